"""GLM-5 once more, in numpy float64 with explicit loops, from published tensor names: what tests compare with.

Written from the published arithmetic, expanded form only, one query at a time; shares no code with glm5_jax but the
naming of parameters in `published`.
"""

import math

import jax
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.convert.published import tensor_table, to_published
from glm5_jax.layers.param import Spec
from glm5_jax.model import Glm5, abstract, merge, specs, split


def micro_config(**overrides) -> ModelConfig:
    """A network of about 10,000 parameters in which no two widths are equal; selects 4 keys."""
    return ModelConfig(
        **dict(
            vocab_size=32, hidden_size=24, num_hidden_layers=3, first_k_dense_replace=1, num_attention_heads=2,
            q_lora_rank=14, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, intermediate_size=18,
            moe_intermediate_size=9, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2, index_n_heads=3,
            index_head_dim=8, index_topk=4, rope_theta=100.0, max_position_embeddings=64, rms_norm_eps=1e-3,
            latent_norm_eps=1e-2, eos_token_id=(0,), pad_token_id=0,
        )
        | overrides
    )  # fmt: skip


def random_model(cfg: ModelConfig, seed: int = 0) -> Glm5:
    """A model with random matrices, norm weights and biases, signals of order 1 everywhere."""
    rng = np.random.default_rng(seed)
    graphdef, shapes = split(abstract(cfg))

    def fill(leaf, spec: Spec):
        noise = rng.standard_normal(leaf.shape)
        if spec.kind == "norm":
            noise = 1 + 0.3 * noise
        elif spec.kind in ("bias", "router_bias"):
            noise = 0.3 * noise
        elif spec.kind != "embedding":
            noise = noise / math.sqrt(math.prod(leaf.shape[i] for i in spec.inputs))
        return jax.numpy.asarray(noise, np.float32)

    return merge(graphdef, jax.tree.map(fill, shapes, specs(abstract(cfg))))


def published(model: Glm5) -> dict[str, np.ndarray]:
    """Published name -> float64 tensor in the published layout."""
    params = split(model)[1]

    def at(path):
        node = params
        for key in path:
            node = node[key]
        return np.asarray(node, np.float64)

    table = tensor_table(model.cfg)
    return {name: to_published([at(p.path)[p.index] for p in pieces], pieces) for name, pieces in table.items()}


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def turn(x, position, theta, interleave=True):
    """RoPE of a vector as multiplication by unit complex numbers."""
    half = len(x) // 2
    z = x[0::2] + 1j * x[1::2] if interleave else x[:half] + 1j * x[half:]
    z = z * np.exp(1j * position * theta ** (-2.0 * np.arange(half) / len(x)))
    parts = [z.real, z.imag]
    return np.stack(parts, 1).ravel() if interleave else np.concatenate(parts)


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu(w, name, x):
    hidden = silu(w[f"{name}.gate_proj.weight"] @ x) * (w[f"{name}.up_proj.weight"] @ x)
    return w[f"{name}.down_proj.weight"] @ hidden


def mixture(w, name, x, cfg: ModelConfig):
    """(output, experts ascending, their weights) for one token."""
    score = 1 / (1 + np.exp(-(w[f"{name}.gate.weight"] @ x)))
    choice = score + w[f"{name}.gate.e_score_correction_bias"]
    size = cfg.n_routed_experts // cfg.n_group
    groups = [sorted(choice[g * size : (g + 1) * size])[-2:] for g in range(cfg.n_group)]
    kept = sorted(range(cfg.n_group), key=lambda g: -sum(groups[g]))[: cfg.topk_group]
    allowed = [e for e in range(cfg.n_routed_experts) if e // size in kept]
    ids = sorted(sorted(allowed, key=lambda e: -choice[e])[: cfg.num_experts_per_tok])
    weights = score[ids] / score[ids].sum() if cfg.norm_topk_prob else score[ids]
    weights = weights * cfg.routed_scaling_factor
    y = swiglu(w, f"{name}.shared_experts", x)
    for e, weight in zip(ids, weights):
        y = y + weight * swiglu(w, f"{name}.experts.{e}", x)
    return y, ids, weights


class Row:
    """One row of tokens on its way through the layers, with what each layer decided."""

    def __init__(self, w, cfg: ModelConfig, positions, segments):
        self.w, self.cfg, self.positions, self.segments = w, cfg, positions, segments
        self.selected = self.scores = None
        self.log = []

    def visible(self, t):
        return [s for s in range(t + 1) if self.segments[s] == self.segments[t] != 0]

    def select(self, p, a, cq, t, keys):
        """The K best visible positions for query t, ascending, and all their scores."""
        w, cfg = self.w, self.cfg
        rope = cfg.qk_rope_head_dim
        q = (w[p + "indexer.wq_b.weight"] @ cq).reshape(cfg.index_n_heads, cfg.index_head_dim)
        for h in range(cfg.index_n_heads):
            q[h, :rope] = turn(q[h, :rope], self.positions[t], cfg.rope_theta, cfg.indexer_rope_interleave)
        head = w[p + "indexer.weights_proj.weight"] @ a / math.sqrt(cfg.index_n_heads)
        scores = {}
        for s in self.visible(t):
            dots = [max(0.0, q[h] @ keys[s] / math.sqrt(cfg.index_head_dim)) for h in range(cfg.index_n_heads)]
            scores[s] = sum(head[h] * dots[h] for h in range(cfg.index_n_heads))
        best = sorted(scores, key=lambda s: (-scores[s], s))[: cfg.index_topk]
        return sorted(best), scores

    def index_key(self, p, a, t):
        w, cfg = self.w, self.cfg
        k = w[p + "indexer.wk.weight"] @ a
        k = (k - k.mean()) / np.sqrt(k.var() + 1e-6)
        k = k * w[p + "indexer.k_norm.weight"] + w[p + "indexer.k_norm.bias"]
        rope = cfg.qk_rope_head_dim
        k[:rope] = turn(k[:rope], self.positions[t], cfg.rope_theta, cfg.indexer_rope_interleave)
        return k

    def latent(self, p, a, t):
        """(normed latent [R], rotated shared key [P])."""
        r = self.cfg.kv_lora_rank
        kv = self.w[p + "kv_a_proj_with_mqa.weight"] @ a
        c = rms(kv[:r], self.w[p + "kv_a_layernorm.weight"], self.cfg.latent_eps)
        return c, turn(kv[r:], self.positions[t], self.cfg.rope_theta)

    def layer(self, i, xs, indexer, dense_ffn, kv=None, reuse=False):
        """Layer i over xs [T][D]; kv: attend to these latents instead of its own."""
        w, cfg = self.w, self.cfg
        base = f"model.layers.{i}."
        p = base + "self_attn."
        n, c, rope, v = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        a = [rms(x, w[base + "input_layernorm.weight"], cfg.rms_norm_eps) for x in xs]
        cqs = [rms(w[p + "q_a_proj.weight"] @ x, w[p + "q_a_layernorm.weight"], cfg.latent_eps) for x in a]
        kv = kv or [self.latent(p, x, t) for t, x in enumerate(a)]
        expanded = [(w[p + "kv_b_proj.weight"] @ latent).reshape(n, c + v) for latent, _ in kv]
        scores = None
        if indexer and not reuse:
            keys = [self.index_key(p, x, t) for t, x in enumerate(a)]
            chosen = [self.select(p, a[t], cqs[t], t, keys) for t in range(len(xs))]
            self.selected, scores = [s for s, _ in chosen], [s for _, s in chosen]
            self.scores = scores
        out, experts, kl = [], [], []
        for t, x in enumerate(xs):
            q = (w[p + "q_b_proj.weight"] @ cqs[t]).reshape(n, c + rope)
            keep = self.selected[t] if cfg.attention == "sparse" else self.visible(t)
            heads, target = [], np.zeros(len(keep))
            for h in range(n):
                turned = turn(q[h, c:], self.positions[t], cfg.rope_theta)
                logit = [q[h, :c] @ expanded[s][h, :c] + turned @ kv[s][1] for s in keep]
                e = np.exp(np.array(logit) / math.sqrt(c + rope))
                target += e / e.sum() / n
                heads.append(sum((e[j] / e.sum()) * expanded[s][h, c:] for j, s in enumerate(keep)) + np.zeros(v))
            x = x + w[p + "o_proj.weight"] @ np.concatenate(heads)
            if self.scores:
                chance = np.exp([self.scores[t][s] for s in keep])
                kl.append(sum(target * np.log(target / (chance / chance.sum()))))
            m = rms(x, w[base + "post_attention_layernorm.weight"], cfg.rms_norm_eps)
            if dense_ffn:
                y = swiglu(w, base + "mlp", m)
            else:
                y, ids, weights = mixture(w, base + "mlp", m, cfg)
                experts.append((ids, weights))
            out.append(x + y)
        self.log.append(
            {"selected": self.selected, "scores": scores, "experts": experts, "hidden": out, "kv": kv, "index_kl": kl}
        )
        return out


def forward(w, cfg: ModelConfig, tokens, positions=None, segments=None, full=None) -> dict:
    """The trunk for one row of tokens [T].

    Args:
      w: from `published`. positions, segments: [T]; default 0.. and all 1.
      full: per layer whether it owns an indexer; default all.
    Returns:
      logits [T,W], hidden [T,D] (final norm), layers: per layer selected, scores, experts, hidden, index_kl.
    """
    t = len(tokens)
    row = Row(w, cfg, range(t) if positions is None else positions, [1] * t if segments is None else segments)
    xs = [w["model.embed_tokens.weight"][i] for i in tokens]
    for i in range(cfg.num_hidden_layers):
        xs = row.layer(i, xs, full is None or full[i], i < cfg.first_k_dense_replace)
    hidden = np.stack([rms(x, w["model.norm.weight"], cfg.rms_norm_eps) for x in xs])
    return {"logits": hidden @ w["lm_head.weight"].T, "hidden": hidden, "layers": row.log}


def mtp(w, cfg: ModelConfig, hidden, tokens, steps, share_selection=False, share_kv=False) -> list[dict]:
    """MTP steps of a row that is one document: step d has T - d rows with logits, hidden and selected."""
    base, results, first = f"model.layers.{cfg.num_hidden_layers}.", [], None
    for d in range(1, steps + 1):
        n = len(tokens) - d
        xs = []
        for i in range(n):
            e = rms(w["model.embed_tokens.weight"][tokens[i + d]], w[base + "enorm.weight"], cfg.rms_norm_eps)
            h = rms(hidden[i], w[base + "hnorm.weight"], cfg.rms_norm_eps)
            xs.append(w[base + "eh_proj.weight"] @ np.concatenate([e, h]))
        row = Row(w, cfg, range(n), [1] * n)
        reuse = first is not None and share_selection
        row.selected = first["selected"] if reuse else None
        kv = first["kv"] if first is not None and share_kv else None
        xs = row.layer(cfg.num_hidden_layers, xs, True, False, kv=kv, reuse=reuse)
        hidden = [rms(x, w[base + "shared_head.norm.weight"], cfg.rms_norm_eps) for x in xs]
        first = first or row.log[0]
        logits = np.stack(hidden) @ w["lm_head.weight"].T
        results.append({"logits": logits, "hidden": np.stack(hidden), "selected": row.selected})
    return results


def padded(selected, width: int) -> np.ndarray:
    """Lists of positions as the model reports them: [T,width], -1 for none."""
    return np.array([list(s) + [-1] * (width - len(s)) for s in selected])
