"""glm5 plan: a small model compiled for a small slice; what it says against closed forms; bad input."""

import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from glm5_jax import cli, plan
from glm5_jax.compiling import compiler_options
from glm5_jax.config import tiny
from glm5_jax.errors import UserError
from glm5_jax.layers.block import recompute
from glm5_jax.program import collectives
from glm5_jax.sharding.mesh import local, make_mesh
from helpers_tpu import TOPOLOGIES, compile_for, need_libtpu

POD = pathlib.Path(__file__).parent.parent / "experiments" / "pods"
SMALL = dict(topology="v5p:2x2x1", mesh="data=2,expert=2,context=1", stage="pretrain", seq=1024, layers=1, mtp_steps=0)


def network():
    """One MoE layer, widths that the chip's tiles divide, so that nothing is filled up."""
    return tiny(
        hidden_size=512, q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128,
        moe_intermediate_size=256, index_head_dim=128, vocab_size=1024, first_k_dense_replace=0, num_nextn_predict_layers=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(results, table, text of the compiled program) of a dense step for four v5p chips."""
    need_libtpu()
    file = tmp_path_factory.mktemp("plan") / "step.hlo"
    return *plan.plan("network", network(), plan.PlanOptions(**SMALL, hlo=str(file))), file.read_text()


@pytest.mark.tpu_compile
def test_flops_of_the_compiled_program_are_those_of_the_closed_form(small):
    flops = small[0]["flops"]
    assert flops["compiled"] == pytest.approx(flops["closed form"], rel=0.02)
    assert 0.2 * flops["compiled"] < flops["of the model"] < flops["compiled"]


@pytest.mark.tpu_compile
def test_a_device_holds_a_fourth_of_parameters_and_moments(small):
    """float32; Muon keeps one moment, AdamW two of embedding, head and router; the frozen indexer has none."""
    memory, total = small[0]["memory"], small[0]["parameters"]
    adamw = 2 * 1024 * 512 + 512 * 8
    indexer = 512 * 4 + 512 * 128 + 256 * 4 * 128
    assert memory["parameters"] == pytest.approx(total * 4 / 4, rel=0.01)
    assert memory["optimizer state"] == pytest.approx((total + adamw - indexer) * 4 / 4, rel=0.01)
    assert memory["all arguments"] >= memory["parameters"] + memory["optimizer state"]
    assert small[0]["fits"] and memory["headroom"] > 0.9
    assert small[0]["dtypes"] == {"parameters": "float32", "optimizer state": "float32, int32", "products": "bfloat16"}


@pytest.mark.smoke
@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_libtpu_takes_the_settings_on_every_chip(topology):
    """Newer versions refuse some, and only for programs with the collectives that they are about; they print them otherwise."""
    need_libtpu()
    mesh = make_mesh(plan.parse_mesh("expert=4" if topology != "tpu7x:2x2x1" else "expert=8"), plan.describe(topology)[1])
    n = mesh.size

    def step(x, y):
        swapped = lax.all_to_all(x, "expert", 0, 0, tiled=True)
        gathered = lax.all_gather(y, "expert", tiled=True)
        return swapped, lax.psum_scatter(gathered.T @ gathered, "expert", tiled=True)

    spec = PartitionSpec("expert")
    place = NamedSharding(mesh, spec)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in ((n * n, 8, 512), (1024, 1024))]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(local(step, mesh, (spec, spec), (spec, spec))).lower(*shapes)
        found = collectives(lowered.compile(compiler_options=compiler_options()).as_text(), mesh)
    assert {c.axes for c in found} == {("expert",)} and {"all-to-all", "all-gather"} <= {c.kind for c in found}


@pytest.mark.tpu_compile
def test_offloaded_activations_wait_in_the_memory_of_the_host():
    """Eight layers keep their inputs, 1,024 x 512 bfloat16."""

    def loss(x, w):
        layer = recompute(lambda x, w: (jnp.tanh(checkpoint_name(x, "layer_input") @ w), None), "offload", prevent_cse=False)
        return jnp.sum(lax.scan(layer, x, w)[0].astype(jnp.float32))

    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 512), (8, 512, 512)))
    memory = compile_for(jax.grad(loss, (0, 1)), *shapes, topology="v5p:2x2x1").memory_analysis()
    assert memory.host_temp_size_in_bytes == 8 * 1024 * 512 * 2


@pytest.mark.tpu_compile
def test_a_decode_step_gathers_no_parameters():
    """Its cache and experts are cut, all other parameters whole; only rows for the experts travel."""
    need_libtpu()
    options = plan.PlanOptions(**SMALL | dict(serve=True, stage="dsa_sparse", batch=64))
    result, table = plan.plan("network", network(), options)
    assert result["flops"]["compiled"] == pytest.approx(result["flops"]["closed form"], rel=0.02)
    experts = 8 * 3 * 512 * 256
    assert result["memory"]["parameters"] == pytest.approx((result["parameters"] - experts / 2) * 2, rel=0.01)
    assert result["memory"]["cache"] == pytest.approx(64 / 4 * 1024 * ((128 + 64 + 128) * 2 + 4), rel=0.01)
    large = [row for row in result["sent"] if row["bytes"] > 1000]
    assert {(row["kind"], tuple(row["axes"])) for row in large} == {("all-to-all", ("expert",))}
    assert "decode: one token for each of 64 rows, whose caches hold 1,024\n" in table and result["fits"]
    assert not re.search("micro|optimizer|recomputation", table + json.dumps(result))


@pytest.mark.tpu_compile
def test_everything_sent_is_named_and_the_table_says_it(small):
    result, table, _ = small
    sent = {(row["kind"], tuple(row["axes"])): row for row in result["sent"]}
    assert not any("?" in axes for _, axes in sent)
    room = 1024 * 2 * 1.25  # rows that a device sends: tokens x experts of each, and a quarter more
    assert sent["all-to-all", ("expert",)]["bytes"] > 5 * room * 512 * 2 / 2  # there and back; again, gradients, theirs back
    for row in result["sent"]:
        assert row["kind"] in table and row["seconds"] > 0
    times = result["seconds"]
    alone = times["without overlap"] - times["links"]
    assert max(times["products"], times["HBM"]) <= alone <= times["products"] + times["HBM"]
    assert times["full overlap"] == max(times[name] for name in ("products", "HBM", "links"))
    held = 2 * result["memory"]["parameters"] + 2 * result["memory"]["optimizer state"]  # the update reads and writes them
    assert result["moved"] > held and f"{result['moved'] / 1e9:.1f}" in table
    assert json.loads(json.dumps(result)) == result


@pytest.mark.tpu_compile
def test_tokens_travel_to_their_experts_beside_products(small):
    """The schedule begins the exchange, multiplies, and only then waits for it, forward and backward."""
    beside, open_exchanges = [], {}
    for line in small[2].splitlines():
        if name := re.match(r"\s*%(all-to-all-start\S*) = ", line):
            open_exchanges[name[1]] = []
        elif done := re.search(r"all-to-all-done\(%?([^)]*)\)", line):
            beside.append(open_exchanges.pop(done[1]))
        elif work := re.search(r" fusion\(.*op_name=\"([^\"]*dot_general[^\"]*)", line):
            for names in open_exchanges.values():
                names.append(work[1])
    assert any("transpose" not in name for names in beside for name in names)
    assert any("transpose" in name for names in beside for name in names)


@pytest.mark.tpu_compile
def test_what_does_not_fit_is_said_with_status_1(monkeypatch, capsys):
    need_libtpu()
    monkeypatch.setattr(plan, "compile_for", lambda program: (None, "Used 120.00G of 95.74G hbm"))
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", "tiny", *options])
    assert stop.value.code == 1
    assert "DOES NOT FIT: Used 120.00G of 95.74G hbm; fewer rows at once (--micro)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "parameters, words",
    [(90, "parameters take most of the memory: a larger mesh expert"), (5, "fewer rows (--batch), or more chips")],
)
def test_what_a_decode_step_that_does_not_fit_needs(parameters, words):
    memory = {"parameters": parameters, "cache": 95 - parameters, "memory": 95}
    assert plan._what_to_change({"stage": "decode", "memory": memory, "compiler": "too much"}) == f"too much; {words}"


@pytest.mark.tpu_compile
def test_rates_of_links():
    """On 8x8x8 v5p chips "data" is one ring of 8, "expert" two, both all three; an all-to-all takes 2 hops in each ring."""
    need_libtpu()
    chip, devices = plan.describe("v5p:8x8x8")
    mesh = make_mesh(plan.parse_mesh("data=8,expert=64"), devices)
    rates = [plan.bandwidth("all-gather", axes, chip, mesh) for axes in (("data",), ("expert",), ("data", "expert"))]
    assert rates == [2 * 90e9, 4 * 90e9, 6 * 90e9]
    assert plan.bandwidth("all-to-all", ("expert",), chip, mesh) == 4 * 90e9 / 4


@pytest.mark.tpu_compile
def test_an_axis_may_take_part_of_a_torus_axis():
    """8 x 8 on 4x4x4 chips: neither is a product of whole torus axes."""
    need_libtpu()
    devices = plan.describe("v5p:4x4x4")[1]
    mesh = make_mesh(plan.parse_mesh("data=1,expert=8,context=8"), devices)
    assert set(mesh.devices.flat) == set(devices) and mesh.devices.shape == (1, 8, 8)


@pytest.mark.tpu_compile
def test_slices_lie_along_data_and_what_crosses_them_takes_the_network():
    need_libtpu()
    chip, devices = plan.describe("v6e:4x4", slices=2)
    mesh = make_mesh(plan.parse_mesh("data=4,expert=8"), devices)
    slices = np.vectorize(lambda d: d.slice_index)(mesh.devices)
    assert (slices == np.array([0, 0, 1, 1])[:, None, None]).all()
    assert plan.bandwidth("all-gather", ("data",), chip, mesh) == chip.network
    assert plan.bandwidth("all-gather", ("expert",), chip, mesh) > chip.link


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(mesh="data=3,expert=2"), "data x expert x context = 3x2x1: there are 4 devices"),
        (dict(mesh="rows=2"), "need data=N,expert=N,context=N"),
        (dict(mesh="data=2,data=2"), "need data=N,expert=N,context=N"),
        (dict(mesh="expert=4", batch=6), "batch=6: must be a multiple of mesh data x expert = 4"),
        (dict(mesh="expert=4", batch=12, micro=6), "micro=6: must be a multiple of mesh data x expert = 4"),
        (dict(serve=True, mesh="expert=4", batch=6), "batch=6: must be a multiple of mesh data x expert = 4"),
        (dict(serve=True, batch=8, micro=4), "micro=4: a decode step takes all its rows at once; set batch"),
        (dict(mesh="context=4", seq=1020), "rows of 1020 tokens cannot be cut into 8 equal pieces"),
        (dict(batch=8, micro=3), "batch=8: must be a multiple of micro=3"),
        (dict(seq=10_000), "seq=10000: the position limit is 4096"),
        (dict(topology="v9:2x2"), "the chip is one of v5p, v6e, tpu7x"),
        (dict(topology="v5p:3x5x7"), "libtpu does not know it"),
        (dict(slices=2, mesh="data=1,expert=8"), "mesh.data=1: must be a multiple of the 2 slices"),
        (dict(serve=True, mesh="data=2,expert=1,context=2"), "a decode step splits rows, not their tokens"),
        (dict(slices=0), "slices=0: must be at least 1"),
        (dict(slices=100_000), "slices=100000: more than 256 are not described"),
        (dict(mesh="data=²"), "need data=N,expert=N,context=N"),
        (dict(seq=0), "seq=0: must be at least 1"),
        (dict(batch=-4), "batch=-4: must be at least 0"),
        (dict(micro=-4, serve=True), "micro=-4: must be at least 0"),
        (dict(hlo="/nonexistent/dir/x"), "hlo=/nonexistent/dir/x: no directory that can be written to"),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_input_is_one_line(options, words):
    need_libtpu()
    with pytest.raises(UserError, match="^[^\n]*$") as error:
        plan.plan("tiny", tiny(), plan.PlanOptions(**SMALL | options))
    assert words in str(error.value)


def test_the_manifest_of_a_pod_runs_a_command_that_exists():
    """As many machines as the topology has, each with its chips; the command's settings parse, its config is sound."""
    job = yaml.safe_load((POD / "gke.yaml").read_text())
    assert job["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and job["kind"] == "JobSet"
    (slices,) = job["spec"]["replicatedJobs"]
    spec = slices["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    assert spec["parallelism"] == spec["completions"] == chips // container["resources"]["limits"]["google.com/tpu"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    program, verb, config, *options = container["command"]
    assert (program, verb) == ("glm5", "train") and options[::2] == ["--processes", "--run-dir"]
    scope: dict = {}
    exec((POD.parent.parent / config).read_text(), scope)
    assert math.prod(scope["config"]().mesh.sizes(chips)) == chips
