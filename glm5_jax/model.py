"""The whole GLM-5 network: embed -> scanned decoder layers -> norm -> head, and the MTP layer (paper section 2.1).

Neighbouring layers with the same FFN are stacked and scanned, whether they own an indexer or not, so compile time does not
grow with depth: GLM-5 and GLM-5.2 are two loops, dense layers and MoE layers.
"""

import functools
import itertools
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
      keys: per group, `Keys` with leading [layers,B,S], index keys [owners of an indexer,B,S].
      segment: int32 [B,S], 0 where no real token stands.
      length: int32 [B], slots in use.
    """

    keys: tuple
    segment: jax.Array
    length: jax.Array


def layer_groups(kinds: tuple) -> list[tuple[str, tuple[bool, ...]]]:
    """Cuts the layers into (FFN, per layer whether it owns an indexer), in order: neighbours with one FFN are a group."""
    return [(ffn, tuple(full for _, full in group)) for ffn, group in itertools.groupby(kinds, key=lambda kind: kind[0])]


def layer_places(kinds: tuple) -> list[tuple[int, int, int | None]]:
    """Where each layer of a scanned model lies, in order: (group, place in the group, place of its indexer there or None)."""
    places = []
    for g, (_, owners) in enumerate(layer_groups(kinds)):
        places += [(g, i, sum(owners[:i]) if own else None) for i, own in enumerate(owners)]
    return places


class Group(nnx.Module):
    """Layers with one FFN, parameters stacked and scanned; those of indexers are stacked apart, one for each that owns one.

    If some layers own an indexer and others do not, one loop serves both: a layer holds the indexer of the last owner, and
    chooses if that is itself.
    """

    def __init__(self, cfg: ModelConfig, ffn: str, owners: tuple[bool, ...], rngs: nnx.Rngs, block: type[Block]):
        self.cfg = cfg
        self.owners = owners
        self.layers = block(cfg, ffn, (sum(owners),) if any(owners) else None, rngs, (len(owners),))

    def __call__(self, x, selection: Selection, ctx, keys: Keys | None, start, collect: frozenset):
        """Scans the layers.

        Args:
          x: [B,T,D]. selection: that of the last layer with an indexer before this group.
          keys: cached, [layers,B,S,...], or None. start: int32 [B], slots to write at.
        Returns:
          (x, selection, keys, list over layers of aux).
        """
        owners = np.array(self.owners)
        mixed = bool(owners.any() and not owners.all())
        shares = not all(indexer for _, indexer in self.cfg.layer_kinds)  # else no layer needs what another one chose
        graphdef, indexers, others = nnx.split(self.layers, lambda path, _: "indexer" in path, ...)
        latents, index_keys = Keys(None, None) if keys is None else keys

        def layer(x, selection, own, indexed, owner, place):
            params, latent = own
            indexer, index_keys = indexed if place is None else jax.tree.map(lambda a: a[place], indexed)
            block = nnx.merge(graphdef, *whole((indexer, params), self.cfg.dtype))
            memory = None if keys is None else Memory(Keys(latent, index_keys), start)
            x = checkpoint_name(x, "layer_input")
            x, selection, now, aux = block(x, ctx, selection, memory, owner=owner, collect=collect)
            return x, selection if shares else NOTHING, Keys(None, None) if keys is None else now, aux

        one = recompute(layer, self.cfg.remat, prevent_cse=False)

        def body(carry, scanned):
            x, selection, index_keys = carry
            own, indexed, owner, place = scanned
            if not mixed:
                x, selection, now, aux = one(x, selection, own, indexed, None, None)
                return (x, selection, None), (now, aux)
            x, selection, now, aux = one(x, selection, own, (indexers, index_keys), owner, place)
            if keys is not None:
                index_keys = index_keys.at[place].set(now.index)
            return (x, selection, index_keys), (now._replace(index=None), aux)

        scanned = ((others, latents), (indexers, index_keys), None, None)
        if mixed:
            places = np.maximum(np.cumsum(owners) - 1, 0)  # the last owner's
            scanned = ((others, latents), None, jnp.asarray(owners), jnp.asarray(places))
        carry = (x, selection, index_keys if mixed else None)
        first = lambda tree: jax.tree.map(lambda a: a[0], tree)  # noqa: E731
        if keys is not None and len(owners) == 1:  # no loop: what is written into a cache is written in place
            (x, selection, _), (keys, aux) = body(carry, first(scanned))
            return x, selection, jax.tree.map(lambda a: a[None], keys), [aux]
        if owners[0] and not jax.tree.leaves(selection):
            # The carry of a scan keeps its shape: what the first layer will put there is known without computing it.
            own, indexed = first(((others, latents), (indexers, index_keys)))
            chosen = jax.eval_shape(lambda: layer(x, NOTHING, own, indexed, None, None)[1])
            carry = (x, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), chosen), carry[2])
        (x, selection, index_keys), (now, aux) = jax.lax.scan(body, carry, scanned)
        per_layer = [jax.tree.map(lambda a, i=i: a[i], aux) for i in range(len(owners))]
        for own, layer_aux in zip(owners, per_layer):
            if not own:
                layer_aux.pop("index_scores", None)
        keys = None if keys is None else now._replace(index=index_keys) if mixed else now
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
        groups = layer_groups(cfg.layer_kinds) if scanned else [(ffn, (full,)) for ffn, full in cfg.layer_kinds]
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
    groups = layer_groups(cfg.layer_kinds) if scanned else [(ffn, (full,)) for ffn, full in cfg.layer_kinds]
    counts = [(len(owners), sum(owners)) for _, owners in groups]
    keys = [empty_keys(cfg, (n, batch, slots), (own, batch, slots) if own else None, dtype) for n, own in counts]
    return Cache(tuple(keys), jnp.zeros((batch, slots), jnp.int32), jnp.zeros(batch, jnp.int32))


def empty_keys(cfg: ModelConfig, latents: tuple[int, ...], index_keys: tuple[int, ...] | None, dtype=None) -> Keys:
    """Zeros for keys: latents [*latents,R+P] and, where layers own an indexer, index keys [*index_keys,J]."""
    dtype = dtype or cfg.dtype
    index = None if index_keys is None else jnp.zeros((*index_keys, cfg.index_head_dim), dtype)
    return Keys(jnp.zeros((*latents, cfg.kv_lora_rank + cfg.qk_rope_head_dim), dtype), index)


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
    for i, (group, place, indexer) in enumerate(layer_places(cfg.layer_kinds)):
        for path, leaf in flat_params.items():
            at = indexer if "indexer" in path else place
            if path[:2] == ("groups", group) and at is not None:
                result["groups", i, *path[2:]] = leaf[at][None]
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

