"""Tasks: what is asked, what scores, what is held out, how they mix; and the whole of reasoning-gym through its adapter."""

import inspect
import itertools
import json
import re
import sys
from collections import Counter
from fractions import Fraction

import pytest
from reasoning_gym.factory import DATASETS

from glm5_jax.errors import UserError
from glm5_jax.rl import gym, tasks
from glm5_jax.rl.tasks import Code, Copy, Countdown, Prompt, Reverse, code_of, evaluate, is_held_out, mixture, task

LADDER = ["reverse:4", "reverse:3:exact", "copy:4", "digit_sum:3", "chain:3", "countdown:3", "code"]
DRAWN = [*LADDER, "gym:chain_sum", "gym:spell_backward"]


def prompts(name, count=40, seed=0, held_out=False):
    return [task(name, seed).prompt(i, held_out) for i in range(count)]


# --- questions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWN)
def test_prompts_are_a_function_of_seed_number_and_part(name):
    first = prompts(name)
    assert [task(name).prompt(i) for i in reversed(range(40))] == first[::-1]
    for other in (prompts(name, seed=1), prompts(name, held_out=True)):
        assert len({p.text for p in first} & {p.text for p in other}) < 10
    assert all(p.task == task(name).name == name and p.ordinal == i for i, p in enumerate(first))
    assert all(Prompt(**json.loads(json.dumps(vars(p)))) == p for p in first)


@pytest.mark.parametrize(
    "name", ["reverse:2", "copy:2", "digit_sum:2", "chain:2", "countdown:2", "code", "gym:count_bits", "gym:dice"]
)
def test_no_question_is_in_both_parts_whatever_the_seeds(name):
    """Small spaces, so that questions recur; the seeds that would overlap if they followed each other."""
    train = {p.text for seed in (0, 1) for p in prompts(name, 150, seed)}
    held = {p.text for seed in (0, 1) for p in prompts(name, 60, seed, held_out=True)}
    assert train and held and not train & held
    assert all(map(is_held_out, held)) and not any(map(is_held_out, train))


def test_one_question_in_four_is_held_out():
    every = ["".join(digits) + "=" for digits in itertools.product("0123456789", repeat=4)]
    assert abs(sum(map(is_held_out, every)) - 2500) < 4 * (10_000 * 0.25 * 0.75) ** 0.5
    assert {p.text for p in prompts("reverse:2", 2000)} == {q for q in map("{:02}=".format, range(100)) if not is_held_out(q)}


def test_too_few_questions_to_hold_some_out(monkeypatch):
    monkeypatch.setattr(Reverse, "_draw", lambda self, rng: ("only one=", {"answer": ""}))
    part = is_held_out("only one=")
    assert Reverse().prompt(0, part).text == "only one="
    with pytest.raises(UserError, match="reverse:4: too few questions"):
        Reverse().prompt(0, not part)


def test_questions_by_hand():
    """The gold answers against a computation of the question as text."""
    for p in prompts("reverse:4"):
        assert re.fullmatch("[0-9]{4}=", p.text) and p.metadata["answer"] == p.text[3::-1]
    for p in prompts("copy:4"):
        assert re.fullmatch("[0-9]{4}[+]", p.text) and p.metadata["answer"] == p.text[:4]
    for p in prompts("digit_sum:3"):
        assert re.fullmatch(r"\d\+\d\+\d=", p.text) and int(p.metadata["answer"]) == sum(map(int, re.findall(r"\d", p.text)))
    for p in prompts("chain:4"):
        terms = re.findall(r"[+-]?\d+", p.text)
        assert len(terms) == 4 and int(p.metadata["answer"]) == sum(map(int, terms))
    for p in prompts("countdown:4", 100):
        numbers, target = p.text[:-1].split(":")
        assert sorted(map(int, re.findall(r"\d+", p.metadata["answer"]))) == sorted(map(int, numbers.split(",")))
        assert eval(p.metadata["answer"]) == int(target)  # written by the generator


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in DRAWN if n != "code"])
def test_the_oracle_scores_1_and_nothing_scores_0(name):
    asked = task(name)
    for p in prompts(name):
        gold = p.metadata["answer"]
        assert asked.score(p, gold) == asked.score(p, f" {gold}\n") == 1.0
        assert asked.score(p, "") == asked.score(p, " \n") == asked.score(p, "None") == asked.score(p, "junk") == 0.0


@pytest.mark.parametrize(
    ("name", "answers", "wanted"),
    [
        ("reverse:2", ["".join(d) for d in itertools.product("0123456789", repeat=2)], Fraction(1, 10)),  # 1/10 of the places
        ("reverse:2:exact", ["".join(d) for d in itertools.product("0123456789", repeat=2)], Fraction(1, 100)),
        ("digit_sum:3", [str(i) for i in range(28)], Fraction(1, 28)),
        ("chain:2", [str(i) for i in range(-99, 199)], Fraction(1, 298)),
    ],
)
def test_the_random_policy_has_its_known_rate(name, answers, wanted):
    for p in prompts(name, 5):
        assert sum(Fraction(task(name).score(p, answer)) for answer in answers) / len(answers) == pytest.approx(wanted)


def test_partial_credit():
    p = Prompt("reverse:4", "1234=", 0, {"answer": "4321"})
    for answer, score in (("4321", 1), ("4320", 3 / 4), ("43", 2 / 4), ("43210", 4 / 5), ("4321" * 10, 4 / 40), ("1234", 0)):
        assert Reverse(4).score(p, answer) == score
        assert Reverse(4, partial=False).score(p, answer) == (score == 1)
        assert Copy(4).score(p, answer) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("1+2*3", 1), ("(2*3)+1", 1), (" 3*2+1 ", 1), ("3*(2+1)-2", 0), ("7", 0), ("3", 0), ("3*2+1+1-1", 0), ("2*3+1.0", 0),
        ("3*2+1=7", 0), ("", 0), ("+", 0), ("1/(2-2)*3", 0), ("1+2**3", 0), ("9**9**9**9", 0), ("1//2+3", 0), ("-1+2*3", 0),
        ("- -1+2*3", 1), ("3-(-2)*1+2", 0), ("lambda:7", 0), ("__import__('os').system('id')", 0), ("(" * 900, 0),
        ("(" * 400 + "1+2*3" + ")" * 400, 0), ("-" * 990 + "1+2*3", 0), ("1" * 5000, 0), ("１+2*3", 0),
        ("1+2*3\n#", 0), ("1,2,3", 0), ("01+2*3", 0), ("True+2*3", 0),
    ],
)  # fmt: skip
def test_countdown_wants_each_number_once(answer, score):
    p = Prompt("countdown:3", "1,2,3:7=", 0, {"numbers": [1, 2, 3], "target": 7, "answer": "1+2*3"})
    assert Countdown(3).score(p, answer) == score


def test_expressions_are_exact():
    assert evaluate("1/3+1/3+1/3") == ([1, 3, 1, 3, 1, 3], 1)
    assert evaluate("8/(3-8/3)") == ([8, 3, 8, 3], 24)
    assert evaluate("9007199254740993*1")[1] == 9007199254740993
    p = Prompt("countdown:4", "1,1,1,1:0=", 0, {"numbers": [2, 2, 3], "target": 4, "answer": ""})
    assert Countdown(3).score(p, "2+2") == Countdown(3).score(p, "2+3") == 0  # a multiset, and not the one of the text


def test_code_is_scored_by_running_it():
    asked = Code(seconds=2)
    by_text = {}
    for i in range(60):
        by_text.setdefault(asked.prompt(i).text.split("returns ")[1][:12], asked.prompt(i))
    assert len(by_text) >= len(tasks._FUNCTIONS)
    for p in list(by_text.values())[:2]:
        gold = p.metadata["answer"]
        assert asked.score(p, f"Sure:\n```python\n{gold}\n```\n") == 1.0
    assert asked.score(p, "print('PASSED')\ndef f(x): return 0") == asked.score(p, "") == 0.0
    for p in by_text.values():  # what the tests expect follows from the reference
        namespace = {}
        exec(p.metadata["answer"] + "\n" + p.metadata["tests"], namespace)
        assert p.metadata["tests"].count("assert f(") == 5


def test_the_last_fenced_block_is_the_code():
    assert code_of("def f(x): pass") == "def f(x): pass"
    assert code_of("a\n```python\none\n```\nb\n```\ntwo\nlines\n```\nc") == "two\nlines\n"
    assert code_of("```py\nnot closed\n") == "not closed\n"


# --- names and mixtures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sums", "no such task"), ("", "no such task"), ("reverse:x", "no number"), ("reverse:-1", "no number"),
        ("reverse:4:4", "too many arguments"), ("code:3", "too many arguments"), ("reverse:1", "length"),
        ("copy:1", "length"), ("copy:4:exact", "too many arguments"),
        ("digit_sum:0", "length"), ("countdown:99", "2 to 8"), ("chain:", "no number"), ("reverse:4@2", "no number"),
        ("gym", "gym:DATASET"), ("gym:gcd:more", "gym:DATASET"), ("gym:nothing", "no such data set"),
        ("gym:composite", "cannot"), ("gym:game_of_life_halting", "cannot"), ("gym:codeio", "cannot"),
    ],
)  # fmt: skip
def test_bad_names_are_one_line(name, message):
    with pytest.raises(UserError, match=message) as error:
        task(name)
    assert "\n" not in str(error.value) and name in str(error.value)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "at least one"), (["reverse:4", "reverse:4@2"], "twice"), (["reverse:4@0"], "positive"),
        (["reverse:4@x"], "weight"), (["reverse:4@"], "weight"), (["reverse:4@-1"], "weight"),
        ([(Reverse(), float("nan"))], "positive"),
    ],
)  # fmt: skip
def test_bad_mixtures_are_one_line(entries, message):
    with pytest.raises(UserError, match=message):
        mixture(entries)


def test_every_batch_has_every_domain_by_its_weight():
    mixed = mixture(["reverse:4@2", "digit_sum:3", (task("chain:2"), 5)], seed=3)
    names = [mixed.prompt(i).task for i in range(1000)]
    shares = {"reverse:4": 2 / 8, "digit_sum:3": 1 / 8, "chain:2": 5 / 8}
    for start, size in itertools.product(range(0, 960, 7), (8, 32, 40)):
        counts = Counter(names[start : start + size])
        assert all(abs(counts[name] - share * size) < 2.5 for name, share in shares.items())
    assert names == [mixture(["reverse:4@2", "digit_sum:3", "chain:2@5"], seed=3).prompt(i).task for i in range(1000)]
    assert names != [mixture(["reverse:4@2", "digit_sum:3", "chain:2@5"], seed=4).prompt(i).task for i in range(1000)]
    assert mixed.prompt(7) == task(names[7], 3 if names[7] != "chain:2" else 0).prompt(7)


# --- reasoning-gym ---------------------------------------------------------------------------------------------------

SLOW = {"futoshiki", "knight_swap", "zebra_puzzles", "puzzle24", "intermediate_integration", "acre", "list_functions",
        "gsm_symbolic", "arc_agi", "rearc", "sokoban", "sudoku", "cryptarithm"}  # fmt: skip
NO_GOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
USABLE = sorted(set(DATASETS) - set(gym._REFUSED) - SLOW)
JUNK = ["junk", "0", "None", "[]", "The answer is xyzzy.", "<answer></answer>", "\ud800", "٣", "9" * 5000]


def test_strip_none_junk_and_gold_over_all_data_sets():
    """Each data set's first question: gold with white space and in a tag is 1, emptiness 0, junk 0 or an exception to count."""
    lucky = []
    for name in USABLE:
        asked = gym.Gym(name)
        p = asked.prompt(0)
        gold = p.metadata["answer"]
        if gold is not None:
            answers = (gold, f"\n {gold} ", f"Let me see: <answer>junk</answer> no, <answer> {gold}\n</answer>.")
            assert [asked.score(p, answer) for answer in answers] == [1, 1, 1], name
        assert (gold is None) == (name in NO_GOLD), name
        assert asked.score(p, "") == asked.score(p, "  ") == asked.score(p, "<answer> </answer>") == 0, name
        for junk in JUNK:
            try:
                lucky += [name] * (asked.score(p, junk) != 0 and junk != gold)
            except Exception:
                continue
    assert not lucky


def test_seeds_and_parts_of_a_data_set_do_not_overlap():
    """The numbers that reasoning-gym seeds an item with: no two prompts share one."""
    asked = {(seed, part): prompts("gym:chain_sum", 130, seed, part) for seed in (0, 1, 1023) for part in (False, True)}
    numbers = [p.metadata["seed"] + p.metadata["index"] for group in asked.values() for p in group]
    assert len(set(numbers)) == len(numbers) and max(numbers) < 2**32
    again, first = gym.Gym("gcd", seed=3).prompt(64 * 4096), gym.Gym("gcd", seed=3).prompt(0)
    assert (again.text, again.metadata) == (first.text, first.metadata)
    for seed in (-1, 1024):
        with pytest.raises(UserError, match="0 to 1023"):
            gym.Gym("gcd", seed=seed)


def test_a_model_cannot_run_code_by_its_answer(tmp_path):
    """Every data set whose scorer executes answers, by every form of call that its scorer could see."""
    target = tmp_path / "created"
    call = f"open({str(target)!r}, 'w')"
    calls = [f"__import__('pathlib').Path({str(target)!r}).touch()", call, f"[{call}]", f"(lambda: {call})()", f"{{{call}}}"]
    for name in sorted((gym._LITERALS | gym._EXPRESSIONS) - SLOW) + ["puzzle24"]:
        asked = gym.Gym(name)
        p = asked.prompt(0)
        for call in calls:
            assert asked.score(p, call) == 0.0 and not target.exists(), (name, call)
        assert not gym._harmless(name, "exec(x)") and not gym._harmless(name, "().__class__()")
    assert gym._harmless("simple_integration", "3*x**2/2 + exp(-2*x) + C") and gym._harmless("n_queens", "_ Q\nQ _")


def test_scorers_that_execute_answers_are_all_known():
    """The sources of reasoning-gym: eval or sympy's parse_expr of the answer, nowhere else."""
    found = set()
    for name, (cls, _) in DATASETS.items():
        source = inspect.getsource(sys.modules[cls.__module__])
        if re.search(r"\b(?:eval|exec|sympify|simplify)\(\s*answer|[.\s(]parse_expr\(answer", source):
            found.add(name)
    assert found == gym._LITERALS | gym._EXPRESSIONS


def test_partial_scores_are_thresholded_unless_asked_for():
    p = gym.Gym("spell_backward").prompt(0)
    nearly = p.metadata["answer"][:-1] + "#"
    assert gym.Gym("spell_backward").score(p, nearly) == 0.0
    assert 0 < gym.Gym("spell_backward", partial=True).score(p, nearly) < 1
    assert task("gym:spell_backward:partial").name == "gym:spell_backward:partial"


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=re.escape('pip install "glm5_jax[rl]"')):
        task("gym:gcd")
