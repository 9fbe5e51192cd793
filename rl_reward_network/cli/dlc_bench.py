"""Score stored captions by the DLC-Bench protocol: how well they describe 100 regions, by the answers of an LLM judge.

    sa2va-rl dlc-bench --predictions pred.json --bench DLC-bench \
        --llm_judge_base_url http://localhost:8000/v1 --llm_judge_model llama3.1-8b [--output FILE]

The prediction file is JSON: annotation id -> caption. The bench folder holds qa.json and class_names.json of
nvidia/DLC-Bench. If the server needs a key, it is read from the environment (OPENAI_API_KEY). Replies are cached: when
the command is run again, only new questions are sent.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_reward_network.artefacts import read_json, write_json
from rl_reward_network.rewards.dlc_bench import read_bench, read_predictions, score_predictions
from rl_reward_network.rewards.judge import Judge
from rl_reward_network.rewards.judge_client import JudgeConfig

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
