"""The whole GLM-5 network: embed -> scanned decoder layers -> norm -> head, and the MTP layer (paper section 2.1).

Layers that repeat are stacked and scanned in the smallest repeating group (GLM-5: one layer; GLM-5.2: F S S S, of which S S S
is a loop of its own), so compile time does not grow with depth.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, SingleDeviceSharding

from glm5_jax.compiling import jit
from glm5_jax.config import ModelConfig, check
from glm5_jax.layers.block import NOTHING, Block, Memory, make_context, recompute, write
from glm5_jax.layers.mla import Keys, Selection
from glm5_jax.layers.mtp import Mtp, MtpStep
from glm5_jax.layers.norm import rms_norm
from glm5_jax.layers.param import Spec, declare
from glm5_jax.sharding.context import own, slots
from glm5_jax.sharding.mesh import shardings_of
from glm5_jax.sharding.rules import look_up, parameter_specs, place_parameters, whole
from glm5_jax.sparse.masks import Rows

COLLECTABLE = ("hidden", "selected", "index_scores", "router", "mtp")


class Output(NamedTuple):
    """Result of a forward pass.

    Attributes:
      logits: float32 [B,T,W].
      hidden: [B,T,D] after the final norm.
      collected: name -> list over layers (None where a layer has no such thing); "mtp" -> `MtpOutput` of steps 1 and 2.
      cache: the cache with this call's tokens, or None.
    """

    logits: jax.Array
    hidden: jax.Array
    collected: dict
    cache: "Cache | None" = None


class MtpOutput(NamedTuple):
    """One MTP step (`Glm5.mtp_steps` unrolls any number): row i of step d predicts token i + d + 1.

    logits: float32 [B,T,W]. hidden: [B,T,D] after `shared_head.norm`. selected: int32 [B,T,min(K,T)].
    """

    logits: jax.Array
    hidden: jax.Array
    selected: jax.Array


class Cache(NamedTuple):
    """Keys of all earlier tokens: R + P numbers a token and layer, plus J on layers that own an indexer.

    Attributes:
      keys: per group, per run of its pattern, `Keys` with leading [*stack,B,S].
      segment: int32 [B,S], 0 where no real token stands.
      length: int32 [B], slots in use.
    """

    keys: tuple
    segment: jax.Array
    length: jax.Array


def layer_groups(kinds: tuple) -> list[tuple[tuple, int]]:
    """Cuts the layers into (pattern, repeats) in order.

    Each cut takes the longest run that a pattern repeated at least twice covers, the shortest such pattern first; a pattern
    of several layers begins at one that owns an indexer, so that a selection never crosses into it.
    """
    groups, start, n = [], 0, len(kinds)
    while start < n:
        best = (kinds[start : start + 1], 1)
        for width in range(1, (n - start) // 2 + 1):
            pattern = kinds[start : start + width]
            repeats = 1
            while kinds[start + repeats * width : start + (repeats + 1) * width] == pattern:
                repeats += 1
            longer = repeats * width > len(best[0]) * best[1]
            if repeats > 1 and longer and (width == 1 or pattern[0][1]):
                best = (pattern, repeats)
        groups.append(best)
        start += len(best[0]) * best[1]
    return groups


def runs(pattern: tuple) -> list[tuple[tuple, int]]:
    """Cuts the pattern of a group into (kind, count): neighbours of one kind without an indexer are one run."""
    cut = []
    for kind in pattern:
        if cut and cut[-1][0] == kind and not kind[1]:
            cut[-1] = (kind, cut[-1][1] + 1)
        else:
            cut.append((kind, 1))
    return cut


def stack(repeats: int, count: int) -> tuple[int, ...]:
    """Leading dimensions of what the layers of a run hold, in a group of so many repeats."""
    return (repeats,) if count == 1 else (repeats, count)


def layer_places(kinds: tuple) -> list[tuple[int, int, tuple[int, ...]]]:
    """Where each layer of a scanned model lies, in order: (group, block, index into the leading dimensions)."""
    places = []
    for g, (pattern, repeats) in enumerate(layer_groups(kinds)):
        for r in range(repeats):
            for b, (_, count) in enumerate(runs(pattern)):
                places += [(g, b, (r, j)[: len(stack(repeats, count))]) for j in range(count)]
    return places


class Group(nnx.Module):
    """`repeats` copies of a short pattern of layers, one block for each run of it, parameters stacked (`stack`) and scanned."""

    def __init__(self, cfg: ModelConfig, pattern: tuple, repeats: int, rngs: nnx.Rngs, block: type[Block]):
        self.cfg = cfg
        self.repeats = repeats
        self.counts = tuple(count for _, count in runs(pattern))
        self.blocks = nnx.List([block(cfg, *kind, rngs, stack(repeats, count)) for kind, count in runs(pattern)])

    def __call__(self, x, selection: Selection, ctx, keys, start, collect: frozenset):
        """Scans the layers.

        Args:
          x: [B,T,D]. selection: that of the last layer with an indexer before this group.
          keys: tuple over the runs of cached `Keys` [*stack,B,S,...], or None. start: int32 [B], slots to write at.
        Returns:
          (x, selection, keys, list over layers of aux).
        """
        graphdefs, stacked = zip(*(nnx.split(block) for block in self.blocks))
        shares = not all(indexer for _, indexer in self.cfg.layer_kinds)  # else no layer needs what another one chose

        def layer(i, params, keys, x, selection):
            block = nnx.merge(graphdefs[i], whole(params, self.cfg.dtype))
            memory = None if keys is None else Memory(keys, start)
            x, selection, now, aux = block(checkpoint_name(x, "layer_input"), ctx, selection, memory, collect=collect)
            return x, selection, None if keys is None else now, aux

        def run(i, params, keys, x, selection):
            one = recompute(functools.partial(layer, i), self.cfg.remat, prevent_cse=False)
            if self.counts[i] == 1:
                x, selection, keys, aux = one(params, keys, x, selection)
                return x, selection, keys, [aux]

            def next_layer(x, scanned):  # layers of a run choose nothing: all see one selection
                x, _, keys, aux = one(*scanned, x, selection)
                return x, (keys, aux)

            x, (keys, aux) = jax.lax.scan(next_layer, x, (params, keys))
            return x, selection, keys, [jax.tree.map(lambda a, j=j: a[j], aux) for j in range(self.counts[i])]

        def body(carry, scanned):
            x, selection = carry
            params, keys = scanned
            new_keys, aux = [], []
            for i in range(len(params)):
                x, selection, now, of_layers = run(i, params[i], None if keys is None else keys[i], x, selection)
                new_keys.append(now)
                aux += of_layers
            carry = (x, selection if shares else NOTHING)
            return carry, (None if keys is None else tuple(new_keys), aux)

        if keys is not None and self.repeats == 1:  # no loop: what is written into a cache is written in place
            first = jax.tree.map(lambda a: a[0], (stacked, keys))
            (x, selection), (keys, aux) = body((x, selection), first)
            return x, selection, jax.tree.map(lambda a: a[None], keys), aux
        if not jax.tree.leaves(selection) and self.blocks[0].attention.indexer is not None:
            # The carry of a scan keeps its shape: what the first layer will put there is known without computing it.
            first = jax.eval_shape(lambda: body((x, NOTHING), jax.tree.map(lambda a: a[0], (stacked, keys)))[0][1])
            selection = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), first)
        (x, selection), (keys, aux) = jax.lax.scan(body, (x, selection), (stacked, keys))
        per_layer = [jax.tree.map(lambda a, r=r: a[r], layer) for r in range(self.repeats) for layer in aux]
        return x, selection, keys, per_layer


class Glm5(nnx.Module):
    """The GLM-5 language model.

    Args:
      cfg: the network. rngs: source of fresh weights (float32).
      scanned: layers that repeat are stacked and scanned; False = every layer has parameters and a cache of its own, which
        takes longer to compile and copies nothing when it decodes (`unstack`).

    A subclass may set `block_class`, and a subclass of Block its `attention_class`, to change a layer
    (experiments/custom_attention.py).
    """

    block_class: type[Block] = Block

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, scanned: bool = True):
        d, w, std = cfg.hidden_size, cfg.vocab_size, cfg.initializer_range
        self.cfg = cfg
        self.embedding = declare(
            rngs, (), (w, d), ("vocab", "embed"), "embedding", std, hf="model.embed_tokens.weight"
        )
        groups = layer_groups(cfg.layer_kinds) if scanned else [((kind,), 1) for kind in cfg.layer_kinds]
        self.groups = nnx.List([Group(cfg, *group, rngs, self.block_class) for group in groups])
        self.norm = declare(rngs, (), (d,), ("embed",), "norm", hf="model.norm.weight")
        self.head = declare(
            rngs, (), (d, w), ("embed", "vocab"), "head", std, inputs=(-2,), outputs=(-1,), hf="lm_head.weight"
        )
        self.mtp = Mtp(cfg, rngs, self.block_class) if cfg.num_nextn_predict_layers else None

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        collect: tuple[str, ...] = (),
        cache: Cache | None = None,
    ) -> Output:
        """Runs the network; compiled once per shape.

        Args:
          tokens: int [B,T].
          positions: int [B,T], rotary positions; default: counted from 0 in each document.
          segment_ids: int [B,T], document of each token, documents do not see each other; 0 = padding. Default: all 1.
          collect: any of `COLLECTABLE`.
          cache: from `empty_cache`; the tokens then extend it.
        Raises:
          UserError: unknown name in `collect`, token ids outside the vocabulary, sequence too long.
        """
        collect = (collect,) if isinstance(collect, str) else collect
        unknown = set(collect) - set(COLLECTABLE)
        check(not unknown, f"collect={sorted(unknown)}: allowed are {', '.join(COLLECTABLE)}")
        check("mtp" not in collect or self.mtp is not None, "collect=mtp: this model has no MTP layer")
        check_tokens(tokens, self.cfg)
        for name, array in (("positions", positions), ("segment_ids", segment_ids)):
            same = array is None or np.shape(array) == np.shape(tokens)
            check(same, f"{name}: shape {np.shape(array)}, tokens have {np.shape(tokens)}")
        check(cache is not None or np.shape(tokens)[1] > 0, "tokens: no token in the rows")
        if cache is not None:
            check_room(cache, np.shape(tokens)[1])
        graphdef, params = nnx.split(self)
        as_int = [None if a is None else jnp.asarray(a, jnp.int32) for a in (tokens, positions, segment_ids)]
        return _forward(graphdef, params, *as_int, cache, tuple(sorted(collect)))

    def trunk(self, tokens, positions=None, segment_ids=None, cache: Cache | None = None, collect=frozenset()):
        """Everything before the head.

        Returns:
          (hidden [B,T,D] after the final norm, list over layers of aux, cache or None). aux holds "max_logit" (largest
          attention logit), for MoE layers "load" [E] and "balance" (sum over rows), and what `collect` names.

        On a mesh the arguments are whole rows and what comes back belongs to this device's tokens (`sharding.context.own`);
        "load" and "max_logit" are those of the device.
        """
        if segment_ids is None:
            segment_ids = jnp.ones(tokens.shape, jnp.int32)
        start = jnp.zeros(tokens.shape[0], jnp.int32) if cache is None else cache.length
        key_segment = segment_ids if cache is None else write(cache.segment, segment_ids, start)
        if positions is None:
            positions = default_positions(key_segment, start, tokens.shape[1])
        rows = Rows(slots(*tokens.shape) + (0 if cache is None else start[:, None]), own(segment_ids))
        ctx = make_context(rows, key_segment, own(positions), self.cfg)
        x, selection, aux, new_keys = self.embed(own(tokens)), NOTHING, [], []
        for i, group in enumerate(self.groups):
            keys = None if cache is None else cache.keys[i]
            x, selection, keys, layer_aux = group(x, selection, ctx, keys, start, collect)
            new_keys.append(keys)
            aux += layer_aux
        if cache is not None:
            cache = Cache(tuple(new_keys), key_segment, start + tokens.shape[1])
        return rms_norm(x, self.norm[...], self.cfg.rms_norm_eps), aux, cache

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token embeddings [B,T,D] in the compute dtype."""
        return look_up(self.embedding, tokens, self.cfg.dtype)

    def output_matrix(self) -> jax.Array:
        """The output head [D,W] as it is stored, so that its gradient is not rounded before devices add theirs."""
        return whole(self.head, self.head.get_value().dtype)[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [B,T,W] of normed hidden states [B,T,D]."""
        head = self.output_matrix().astype(hidden.dtype)
        return jnp.einsum("btd,dw->btw", hidden, head, preferred_element_type=jnp.promote_types(hidden.dtype, jnp.float32))

    def mtp_steps(
        self, hidden, tokens, positions=None, segment_ids=None, steps: int = 1, collect=frozenset()
    ) -> list[MtpStep]:
        """Unrolls the MTP layer over `steps` steps from the trunk's normed hidden states [B,T,D]; see `Mtp.unroll`.

        On a mesh `hidden` is that of this device's tokens, the other arguments are whole rows.
        """
        if segment_ids is None:
            segment_ids = jnp.ones(tokens.shape, jnp.int32)
        if positions is None:
            positions = default_positions(segment_ids, jnp.zeros(tokens.shape[0], jnp.int32), tokens.shape[1])
        graphdef, params = nnx.split(self.mtp)
        mtp = nnx.merge(graphdef, whole(params, self.cfg.dtype))
        return mtp.unroll(hidden, tokens, self.embed, positions, segment_ids, steps, frozenset(collect))


def default_positions(segment: jax.Array, start: jax.Array, t: int) -> jax.Array:
    """Positions int32 [B,t] of slots start..start+t, start int32 [B]: each run of one segment id in segment [B,S] counts
    from 0."""
    slots = jnp.arange(segment.shape[1], dtype=jnp.int32)
    changes = segment != jnp.pad(segment[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    first = jax.lax.cummax(jnp.where(changes, slots, 0), axis=1)
    return jnp.take_along_axis(slots - first, start[:, None] + jnp.arange(t, dtype=jnp.int32), axis=1, mode="clip")


def check_tokens(tokens, cfg: ModelConfig) -> None:
    """Raises UserError for ids outside the vocabulary (concrete arrays only) or a sequence past the position limit."""
    check(np.ndim(tokens) == 2, f"tokens: shape {np.shape(tokens)}, need [B,T]")
    kind = tokens.dtype if hasattr(tokens, "dtype") else np.asarray(tokens).dtype
    check(np.size(tokens) == 0 or jnp.issubdtype(kind, jnp.integer), f"tokens: dtype {kind}, need integers")
    t = np.shape(tokens)[1]
    check(t <= cfg.max_position_embeddings, f"sequence of {t} tokens: the limit is {cfg.max_position_embeddings}")
    if not isinstance(tokens, jax.core.Tracer) and np.size(tokens):
        low, high = int(np.min(tokens)), int(np.max(tokens))
        check(0 <= low and high < cfg.vocab_size, f"token ids {low}..{high}: the vocabulary is 0..{cfg.vocab_size - 1}")


def check_room(cache: Cache, t: int) -> None:
    """Raises UserError when t more tokens do not fit (concrete caches only)."""
    slots = cache.segment.shape[1]
    if not isinstance(cache.length, jax.core.Tracer):
        used = int(np.max(cache.length, initial=0))
        check(used + t <= slots, f"cache: {used} of {slots} slots are in use, {t} more tokens do not fit")


def empty_cache(cfg: ModelConfig, batch: int, slots: int, dtype=None, scanned: bool = True) -> Cache:
    """A cache for `batch` rows of at most `slots` tokens, zeros, in the compute dtype unless told otherwise."""
    groups = layer_groups(cfg.layer_kinds) if scanned else [((kind,), 1) for kind in cfg.layer_kinds]
    keys = []
    for pattern, repeats in groups:
        shapes = [(full, (*stack(repeats, count), batch, slots)) for (_, full), count in runs(pattern)]
        keys.append(tuple(empty_keys(cfg, shape, full, dtype) for full, shape in shapes))
    return Cache(tuple(keys), jnp.zeros((batch, slots), jnp.int32), jnp.zeros(batch, jnp.int32))


def empty_keys(cfg: ModelConfig, shape: tuple[int, ...], indexer: bool, dtype=None) -> Keys:
    """Zeros for the keys of a layer, [*shape,R+P] and, if it owns an indexer, [*shape,J]."""
    dtype = dtype or cfg.dtype
    index = jnp.zeros((*shape, cfg.index_head_dim), dtype) if indexer else None
    return Keys(jnp.zeros((*shape, cfg.kv_lora_rank + cfg.qk_rope_head_dim), dtype), index)


def split(model: nnx.Module) -> tuple[nnx.GraphDef, dict]:
    """(static structure, nested dict of parameter arrays) of a model; `merge` undoes it."""
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def merge(graphdef: nnx.GraphDef, params: dict) -> nnx.Module:
    """The model of `split`; cheap, meant to be called inside traced functions."""
    return nnx.merge(graphdef, params)


def unstack(params: dict, cfg: ModelConfig) -> dict:
    """Parameters of a model whose layers are scanned as those of one whose layers are not, nested dicts both."""
    flat_params = flat(params)
    result = {path: leaf for path, leaf in flat_params.items() if path[0] != "groups"}
    for i, (group, block, index) in enumerate(layer_places(cfg.layer_kinds)):
        for path, leaf in flat_params.items():
            if path[:4] == ("groups", group, "blocks", block):
                result["groups", i, "blocks", 0, *path[4:]] = leaf[index][None]
    return traverse_util.unflatten_dict(result)


def specs(model: nnx.Module) -> dict:
    """Nested dict like that of `split`, with the `Spec` of each parameter."""
    state = nnx.state(model)
    is_param = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    return nnx.to_pure_dict(jax.tree.map(lambda p: p.get_metadata()["spec"], state, is_leaf=is_param))


def abstract(cfg: ModelConfig, network: type[Glm5] = Glm5, **options) -> Glm5:
    """The model with shapes in place of arrays; nothing is allocated. options: of the constructor."""
    return nnx.eval_shape(lambda: network(cfg, nnx.Rngs(0), **options))


def template(
    cfg: ModelConfig, dtype: str, mesh: Mesh | None = None, network: type[Glm5] = Glm5
) -> tuple[nnx.GraphDef, dict]:
    """`split` of a model that is yet to be read: `jax.ShapeDtypeStruct`s in place of arrays.

    Args:
      dtype: of the parameters, except the router bias: rounding it to bfloat16 changes the experts.
      mesh: where they shall lie; None = on the default device.
    """
    model = abstract(cfg, network)
    if mesh is not None:
        model = place_parameters(model, dict(mesh.shape))
        shardings = shardings_of(mesh, parameter_specs(model))
    graphdef, shapes = split(model)
    if mesh is None:
        here = SingleDeviceSharding(jax.config.jax_default_device or jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: here, shapes)
    dtypes = jax.tree.map(
        lambda spec: jnp.dtype("float32" if spec.kind == "router_bias" else dtype),
        specs(model),
        is_leaf=lambda s: isinstance(s, Spec),
    )
    describe = lambda x, dtype, sharding: jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)  # noqa: E731
    return graphdef, jax.tree.map(describe, shapes, dtypes, shardings)


def flat(tree: dict) -> dict:
    """Path -> leaf of a nested dict; `traverse_util.unflatten_dict` undoes it."""
    return traverse_util.flatten_dict(tree)


@functools.partial(jit, static_argnums=(0, 6))
def _forward(graphdef, params, tokens, positions, segment_ids, cache, collect):
    model = nnx.merge(graphdef, params)
    per_layer = frozenset(collect) - {"mtp"}
    hidden, aux, cache = model.trunk(tokens, positions, segment_ids, cache, per_layer)
    collected = {name: [layer.get(name) for layer in aux] for name in per_layer}
    if "mtp" in collect:
        steps = model.mtp_steps(hidden, tokens, positions, segment_ids, 2, frozenset({"selected"}))
        collected["mtp"] = [MtpOutput(model.logits(s.hidden), s.hidden, s.selected) for s in steps]
    return Output(model.logits(hidden), hidden, collected, cache)

