"""Score stored captions by the DLC-Bench protocol: how well they describe 100 regions, by the answers of an LLM judge.

    python -m benchmarks.dlc_bench --predictions pred.json --bench DLC-bench \
        --llm_judge_base_url http://localhost:8000/v1 --llm_judge_model llama3.1-8b [--output FILE]

The prediction file is JSON: annotation id -> caption. The bench folder holds qa.json and class_names.json of
nvidia/DLC-Bench. If the server needs a key, it is read from the environment (OPENAI_API_KEY). Replies are cached: when
the command is run again, only new questions are sent.

Per object: if the answer to the recognition question is No, each further score s becomes min(0, s). pos and neg are the
means over the positive and the negative questions, score is the mean over both. Benchmark: Pos is the mean of pos over
the objects, Neg the mean of neg over the objects with negative questions, Avg = (Pos + Neg) / 2. All are in [-1, 1]. As
in the original, a reply without a choice counts as "not mentioned", 0, and is counted; a question without a reply is an
error.

Source: NVlabs/describe-anything, evaluation/eval_model_outputs.py; re-implemented with our own prompts. The choice of
the judge changes Avg by several points, so numbers are comparable only for one judge and one prompt version.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rl_reward_network.artefacts import read_json, write_json
from rl_reward_network.cli.app import run
from rl_reward_network.rewards.judge import (
    PROMPT_VERSION,
    Judge,
    Question,
    answer_request,
    gated,
    recognition_question,
)
from rl_reward_network.rewards.judge_client import Answer, JudgeConfig, Request

FILES = ("qa.json", "class_names.json")


@dataclass(frozen=True)
class Args:
    """Score stored captions by the DLC-Bench protocol."""

    predictions: Path
    """JSON file: annotation id -> caption."""
    bench: Path
    """Folder with qa.json and class_names.json."""
    llm_judge_base_url: str
    """Address of an OpenAI-compatible server, usually ending in /v1."""
    llm_judge_model: str
    """Name of the judge model on the server."""
    output: Path | None = None
    """Where the result is written; <predictions>_eval.json by default."""
    llm_judge_cache: Path = Path("outputs/llm_judge")
    """Folder of cached replies."""
    llm_judge_concurrency: int = 8
    """Maximum number of concurrent requests."""


def main(args: Args) -> None:
    """Read, query the judge, score, write."""
    config = JudgeConfig(
        args.llm_judge_base_url,
        args.llm_judge_model,
        max_concurrency=args.llm_judge_concurrency,
        cache_path=args.llm_judge_cache,
    )
    output = args.output or args.predictions.with_name(f"{args.predictions.stem}_eval.json")
    if output.resolve() == args.predictions.resolve():
        raise ValueError(f"--output {output}: would replace the predictions; choose another file")
    if missing := [name for name in FILES if not (args.bench / name).exists()]:
        raise ValueError(
            f"--bench {args.bench}: {missing[0]} is missing; download it by "
            "hf download nvidia/DLC-Bench --repo-type dataset --local-dir DLC-bench"
        )
    qa, class_names = (read_json(args.bench / name) for name in FILES)
    bench = read_bench(qa, class_names, str(args.bench))
    predictions = read_predictions(read_json(args.predictions), bench, str(args.predictions))
    judge = Judge(config)
    judge.check()
    result = score_predictions(judge, bench, predictions)
    write_json(output, result)
    report(result, len(bench))
    print(f"\nwritten: {output}")


def report(result: dict[str, Any], objects: int) -> None:
    """Print the three scores and the number of requests."""
    neg, avg = ("none" if result[name] is None else f"{result[name]:.3f}" for name in ("avg_neg", "avg"))
    counts = dict(result["judge"])
    print(f"{objects} objects, judge {counts.pop('model')}: Pos {result['avg_pos']:.3f}  Neg {neg}  Avg {avg}")
    print(", ".join(f"{name} {number}" for name, number in counts.items()))


POSITIVE, NEGATIVE = "positive", "negative"
LETTERS = 26
MAX_IDS = 5  # in a message


@dataclass(frozen=True)
class BenchQuestion:
    """A question of the benchmark; `kind` is positive or negative, some negative ones have a `subtype`."""

    question: Question
    kind: str
    subtype: str | None = None


@dataclass(frozen=True)
class BenchObject:
    """An annotated region: its class name and its questions, at least one of them positive."""

    name: str
    questions: tuple[BenchQuestion, ...]


@dataclass(frozen=True)
class ObjectScore:
    """Scores in [-1, 1]: of each question, their means by kind (`neg` is None without negatives), and of all."""

    results: tuple[float, ...]
    pos: float
    neg: float | None
    score: float


def object_score(questions: Sequence[BenchQuestion], chosen: Sequence[int | None], recognised: bool) -> ObjectScore:
    """The scores of one object from the chosen indices; None (no choice in the reply) counts as 0."""
    pairs = zip(questions, chosen, strict=True)
    scores = [0.0 if index is None else item.question.choices[index][1] for item, index in pairs]
    results = gated(scores, recognised)
    by_kind = {
        kind: [result for item, result in zip(questions, results, strict=True) if item.kind == kind]
        for kind in (POSITIVE, NEGATIVE)
    }
    neg = _mean(by_kind[NEGATIVE]) if by_kind[NEGATIVE] else None
    return ObjectScore(tuple(results), _mean(by_kind[POSITIVE]), neg, _mean(results))


def benchmark_score(scores: Sequence[ObjectScore]) -> dict[str, float | None]:
    """Pos, Neg and Avg of one or more objects as `avg_pos`, `avg_neg`, `avg`; None without negatives."""
    pos = _mean([score.pos for score in scores])
    negatives = [score.neg for score in scores if score.neg is not None]
    neg = _mean(negatives) if negatives else None
    return {"avg_pos": pos, "avg_neg": neg, "avg": None if neg is None else (pos + neg) / 2}


def score_predictions(judge: Judge, bench: Mapping[str, BenchObject], predictions: Mapping[str, str]) -> dict[str, Any]:
    """Score every caption by the judge's answers.

    Args:
        judge: the LLM judge.
        bench: objects by annotation id, as `read_bench` gives them.
        predictions: caption by annotation id, as `read_predictions` gives them.

    Returns:
        JSON in the form of the original's `_eval.json`: annotation id -> caption, prompts, replies, details and scores;
        `avg_pos`, `avg_neg`; and, not in the original, `avg` and `judge` with its model and counts.

    Raises:
        ValueError: a question got no reply, or the reply to a recognition question names neither Yes nor No.
    """
    by_object = {key: _requests(predictions[key], item) for key, item in bench.items()}
    requests = [request for group in by_object.values() for request in group]
    answers = list(tqdm(judge.ask(requests), total=len(requests), desc="judge", unit="question"))
    _check_answered(judge, answers)
    answers_left, rows, scores = iter(answers), {}, []
    for key, group in by_object.items():
        recognition, *others = islice(answers_left, len(group))
        recognised = _recognised(key, recognition)
        scores.append(object_score(bench[key].questions, [answer.value for answer in others], recognised))
        row = {"pred": predictions[key], "prompt": [request.prompt for request in group]}
        rows[key] = row | _details(bench[key], recognition, others, scores[-1])
    unreadable = sum(answer.value is None for answer in answers)
    about = {"model": judge.config.model, "prompt_version": PROMPT_VERSION, "unreadable": unreadable}
    return {**rows, **benchmark_score(scores), "judge": about | judge.counts}


def read_bench(qa: Any, class_names: Any, where: str) -> dict[str, BenchObject]:
    """The objects in the JSON of `qa.json` and `class_names.json`, by annotation id.

    Raises:
        ValueError: another format; the message starts with `where`, the folder, and names file, id and field.
    """
    for name, value in (("qa.json", qa), ("class_names.json", class_names)):
        if not isinstance(value, dict) or not value:
            raise ValueError(f"{where}/{name}: expected an object of annotation ids, got {_kind(value)}")
    bench = {}
    for key, items in qa.items():
        name = class_names.get(key)
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{where}/class_names.json: {key} has the name {name!r}, expected words")
        if not isinstance(items, list):
            raise ValueError(f"{where}/qa.json: {key} is {_kind(items)}, expected a list")
        questions = tuple(_bench_question(item, f"{where}/qa.json: {key}[{n}]") for n, item in enumerate(items))
        if not any(item.kind == POSITIVE for item in questions):
            raise ValueError(f"{where}/qa.json: {key} has no positive question")
        bench[key] = BenchObject(name.strip(), questions)
    return bench


def read_predictions(values: Any, bench: Mapping[str, BenchObject], where: str) -> dict[str, str]:
    """The caption of each object in the JSON of a prediction file; other keys (`query`) are ignored.

    Raises:
        ValueError: a caption is missing, not a string, or an "Error: ..."; `where` is the file.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected an object of annotation id -> caption, got {_kind(values)}")
    if missing := [key for key in bench if key not in values]:
        raise ValueError(f"{where}: {len(missing)} of {len(bench)} captions are missing ({_some(missing)}); make them")
    if wrong := [key for key in bench if not isinstance(values[key], str)]:
        raise ValueError(f"{where}: the caption of {wrong[0]} is {_kind(values[wrong[0]])}, expected a string")
    if failed := [key for key in bench if values[key].startswith("Error:")]:
        raise ValueError(f"{where}: {len(failed)} captions are errors of the model ({_some(failed)}); make them again")
    return {key: values[key] for key in bench}


def _bench_question(item: Any, where: str) -> BenchQuestion:
    """One entry of `qa.json`."""
    try:
        kind, subtype = item["type"], item.get("subtype")
        choices = tuple((str(words), float(score)) for words, score in item["choices"])
        question = Question(str(item["question"]), choices)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{where} is not a question ({type(error).__name__}: {error})") from None
    if kind not in (POSITIVE, NEGATIVE) or not 2 <= len(choices) <= LETTERS:
        raise ValueError(f"{where}: type {kind!r} with {len(choices)} choices; expected positive or negative, 2 to 26")
    if bad := [score for _, score in choices if not (math.isfinite(score) and abs(score) <= 1)]:
        raise ValueError(f"{where}: a choice has the score {bad[0]}, expected -1 to 1")
    return BenchQuestion(question, kind, subtype)


def _requests(caption: str, item: BenchObject) -> list[Request]:
    """The requests about a caption, recognition first."""
    questions = (recognition_question(item.name), *(each.question for each in item.questions))
    return [answer_request(caption, question) for question in questions]


def _check_answered(judge: Judge, answers: Sequence[Answer]) -> None:
    """Raise a ValueError if a question has no reply."""
    if unanswered := sum(answer.reply is None for answer in answers):
        raise ValueError(
            f"LLM judge {judge.config.base_url}: {unanswered} of {len(answers)} questions got no reply (the "
            f"latest failure: {judge.failing() or judge.last_failure}); run the same command again, replies are cached"
        )


def _recognised(key: str, answer: Answer) -> bool:
    """Whether the answer is Yes (choice 0)."""
    if answer.value is None:
        raise ValueError(
            f"object {key}: the judge answers the recognition question by {str(answer.reply)[:80]!r}, which is neither "
            "Yes nor No; take another judge"
        )
    return bool(answer.value == 0)


def _details(item: BenchObject, recognition: Answer, others: Sequence[Answer], score: ObjectScore) -> dict[str, Any]:
    """The original's fields of an object, except caption and prompts."""
    details = [
        _detail(each.question, answer, result)
        | {"type": each.kind, "question_index": number}
        | ({} if each.subtype is None else {"subtype": each.subtype})
        for number, (each, answer, result) in enumerate(zip(item.questions, others, score.results, strict=True))
    ]
    verdict = "correct" if recognition.value == 0 else "incorrect"
    first = _detail(recognition_question(item.name), recognition, verdict) | {"type": "recognition"}
    negatives = [detail for detail in details if detail["type"] == NEGATIVE]
    return {
        "response": [answer.reply for answer in (recognition, *others)],
        "details_positives": [detail for detail in details if detail["type"] == POSITIVE],
        "details_negatives": negatives,
        "details_recognition": [first],
        "score": score.score,
        "score_pos": score.pos,
        "score_neg": score.neg,
        "neg_valid_num": len(negatives),
        "recognition_result": recognition.value == 0,
    }


def _detail(question: Question, answer: Answer, result: float | str) -> dict[str, Any]:
    """The original's fields of one question."""
    choices = [list(choice) for choice in question.choices]
    read = {"pred_answer": (answer.reply or "").strip(), "pred_index": answer.value, "eval_result": result}
    return {"question": question.text, "choices": choices, **read}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _kind(value: Any) -> str:
    return "an empty object" if value == {} else type(value).__name__


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:MAX_IDS]) + (", ..." if len(keys) > MAX_IDS else "")


if __name__ == "__main__":
    run(main, Args)
