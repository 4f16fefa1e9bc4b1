"""Schedules against closed forms, and everything counted in tokens against a loop over steps."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.errors import UserError
from glm5_jax.train.schedule import BatchPlan, LearningRate, by_step, check_by_tokens

PEAK, FINAL, WARM, STEPS = 0.02, 0.002, 10, 110


def progress(step: int) -> float:
    return min((step - WARM) / (STEPS - WARM), 1.0)


CLOSED_FORM = {
    "cosine": lambda step: FINAL + (PEAK - FINAL) * (1 + math.cos(math.pi * progress(step))) / 2,
    "linear": lambda step: PEAK + (FINAL - PEAK) * progress(step),
    "constant": lambda step: PEAK,
}


@pytest.mark.parametrize("kind", CLOSED_FORM)
def test_learning_rate_is_the_closed_form(kind):
    schedule = LearningRate(kind, PEAK, FINAL, WARM).schedule(STEPS)
    for step in (0, 1, 4, 9):
        assert float(schedule(step)) == pytest.approx(PEAK * (step + 1) / WARM, rel=1e-5), step
    for step in (10, 11, 35, 60, 85, 109, 110, 500):
        assert float(schedule(step)) == pytest.approx(CLOSED_FORM[kind](step), rel=1e-5), step


@pytest.mark.parametrize("kind", CLOSED_FORM)
def test_without_warm_up_the_first_step_uses_the_peak(kind):
    assert float(LearningRate(kind, PEAK, FINAL, 0).schedule(50)(0)) == pytest.approx(PEAK)


def test_one_step_of_warm_up_is_none():
    schedule = LearningRate("constant", PEAK, FINAL, 1).schedule(5)
    np.testing.assert_allclose([float(schedule(s)) for s in range(5)], PEAK, rtol=1e-6)


def test_a_run_shorter_than_its_warm_up_ends_at_the_peak():
    schedule = LearningRate("cosine", PEAK, FINAL, 100).schedule(4)
    np.testing.assert_allclose([float(schedule(s)) for s in range(4)], PEAK * np.array([1, 2, 3, 4]) / 4, rtol=1e-6)


def test_learning_rate_traces_under_jit():
    schedule = LearningRate("cosine", PEAK, FINAL, WARM).schedule(STEPS)
    got = jax.jit(jax.vmap(schedule))(jnp.arange(0, 110, 7))
    np.testing.assert_allclose(got, [float(schedule(s)) for s in range(0, 110, 7)], rtol=1e-6)


def brute_force(rows: tuple, micro: int, seq_len: int, steps: int) -> tuple[list[int], list[int]]:
    """(rows of each step, tokens before each step): the value in force is the last whose token count is reached."""
    seen, rows_at, before = 0, [], []
    for _ in range(steps):
        (*_, (_, now)) = [entry for entry in rows if entry[0] <= seen]
        rows_at.append(now)
        before.append(seen)
        seen += now * seq_len
    return rows_at, before


@st.composite
def ramps(draw):
    micro, seq_len = draw(st.integers(1, 3)), draw(st.integers(2, 20))
    starts = sorted(draw(st.sets(st.integers(1, 2000), max_size=4)))
    values = [micro * draw(st.integers(1, 4)) for _ in range(len(starts) + 1)]
    return tuple(zip([0, *starts], values)), micro, seq_len


@settings(max_examples=150, deadline=None)
@given(ramps(), st.integers(0, 3000))
def test_batch_ramp_equals_a_loop_over_steps(ramp, tokens):
    rows, micro, seq_len = ramp
    plan = BatchPlan(rows, micro, seq_len)
    rows_at, before = brute_force(rows, micro, seq_len, 60)
    assert [plan.rows_at(s) for s in range(60)] == rows_at
    assert [plan.tokens_before(s) for s in range(60)] == before
    if tokens <= before[-1]:
        assert plan.step_of(tokens) == next(s for s in range(60) if before[s] >= tokens)


@settings(max_examples=40, deadline=None)
@given(ramps(), st.sets(st.integers(1, 3000), max_size=3), st.randoms(use_true_random=False))
def test_value_by_tokens_equals_a_loop_over_steps(ramp, starts, random):
    plan = BatchPlan(*ramp)
    values = tuple((t, random.random()) for t in [0, *sorted(starts)])
    _, before = brute_force(*ramp, steps=40)
    got = jax.vmap(by_step(values, plan, "mtp_weight"))(jnp.arange(40))
    expected = [[v for t, v in values if t <= seen][-1] for seen in before]
    np.testing.assert_array_equal(got, np.float32(expected))


@st.composite
def rising_lengths(draw):
    """(batch ramp, lengths): each length divides the tokens of a micro-batch, the last is that of the ramp."""
    micro, last = draw(st.integers(1, 3)), draw(st.sampled_from([12, 24, 48]))
    shorter = [n for n in range(2, last) if micro * last % n == 0]
    chosen = sorted(draw(st.sets(st.sampled_from(shorter), max_size=3)))
    starts = sorted(draw(st.sets(st.integers(1, 1500), min_size=len(chosen), max_size=len(chosen))))
    rows = ((0, micro * draw(st.integers(1, 3))), (draw(st.integers(1, 900)), micro * draw(st.integers(1, 3))))
    return (rows, micro, last), tuple(zip([0, *starts], [*chosen, last]))


@settings(max_examples=150, deadline=None)
@given(rising_lengths())
def test_lengths_by_tokens_equal_a_loop_over_steps_and_change_no_tokens(case):
    ramp, lengths = case
    plan, plain = BatchPlan(*ramp, lengths), BatchPlan(*ramp)
    before = brute_force(*ramp, steps=40)[1]
    expected = [[length for tokens, length in lengths if tokens <= seen][-1] for seen in before]
    steps = range(40)
    assert [plan.length_at(s) for s in steps] == expected
    assert [plan.tokens_before(s) for s in steps] == before
    assert [plan.rows_at(s) * plan.length_at(s) for s in steps] == [plain.rows_at(s) * ramp[2] for s in steps]
    assert [plan.micro_batches_at(s) * plan.micro_rows_at(s) for s in steps] == [plan.rows_at(s) for s in steps]
    assert [plan.micro_batches_at(s) for s in steps] == [plain.rows_at(s) // ramp[1] for s in steps]
    assert plan.phases(40) == [s for s in steps if s == 0 or expected[s] != expected[s - 1]]
    assert [lengths[plan.phase_at(s)][1] for s in steps] == expected


def test_lengths_of_the_papers_mid_training_fit_a_micro_batch_of_64_rows():
    """1T tokens in rows of 32K, 500B of 128K, 50B of 202,752 (paper section 2.3); 64 x 202,752 tokens a step."""
    per_step = 64 * 202_752
    plan = BatchPlan(((0, 64),), 64, 202_752, ((0, 32_768), (1e12, 131_072), (1.5e12, 202_752)))
    firsts = [0, math.ceil(1e12 / per_step), math.ceil(1.5e12 / per_step)]
    assert plan.phases(200_000) == firsts
    assert [plan.rows_at(s) for s in firsts] == [396, 99, 64]


def test_the_papers_schedule_changes_at_fifteen_trillion_tokens():
    """MTP weight 0.3, then 0.1; at 4M tokens a step the change comes after 3,576,279 steps."""
    plan = BatchPlan(((0, 1024),), 1024, 4096)
    value = by_step(((0, 0.3), (15e12, 0.1)), plan, "mtp_weight")
    first = math.ceil(15e12 / (1024 * 4096))
    assert [float(value(jnp.int32(s))) for s in (0, first - 1, first)] == [np.float32(0.3)] * 2 + [np.float32(0.1)]


def test_a_change_beyond_the_largest_step_never_comes():
    value = by_step(((0, 0.3), (15e12, 0.1)), BatchPlan(((0, 1),), 1, 32), "mtp_weight")
    assert float(value(jnp.int32(2**31 - 2))) == np.float32(0.3)


@pytest.mark.parametrize("rows", [((0, 3),), ((0, 0),), ((0, 2), (100, 3)), ((0, 2.5),)])
def test_rows_that_are_no_positive_multiple_of_a_micro_batch_are_refused(rows):
    with pytest.raises(UserError, match=r"^batch_rows=[-\d.]+: must be a positive multiple of micro_rows=2$"):
        BatchPlan(rows, 2, 8)


PAIRS = r"^bias_rate=.*: pairs \(tokens, value\), finite and not negative, the tokens rising from 0$"


@pytest.mark.parametrize("values", [(), ((5, 1.0),), ((0, 1.0), (0, 2.0)), ((0, 1.0), (9, 2.0), (8, 3.0))])
def test_token_counts_must_rise_from_zero(values):
    with pytest.raises(UserError, match=PAIRS):
        check_by_tokens("bias_rate", values)


@pytest.mark.parametrize("bad", [math.inf, math.nan, -1.0])
def test_a_schedule_by_tokens_is_finite_and_not_negative(bad):
    for values in (((0, bad),), ((0, 1.0), (bad, 2.0)), ((0, 1.0), (9, bad))):
        with pytest.raises(UserError, match=PAIRS):
            check_by_tokens("bias_rate", values)
    for rows, lengths in ((((0, 2), (bad, 4)), ()), (((0, 2),), ((0, 4), (bad, 8)))):
        with pytest.raises(UserError, match=r"^(batch_rows|lengths)=.*: pairs "):
            BatchPlan(rows, 2, 8, lengths)


@pytest.mark.parametrize("bad", [dict(peak=0.0), dict(final=-1.0), dict(warmup_steps=-1)])
def test_a_learning_rate_out_of_range_is_named(bad):
    with pytest.raises(UserError, match=rf"{next(iter(bad))}={next(iter(bad.values()))}"):
        LearningRate(**bad)
