"""Which checkpoint of an adaptation to deploy, where the target has no masks: criteria x checkpoints x shifts.

    python -m benchmarks.choose ARCADE --model_path RUN/merged --reward_net NET --targets DCA1 inverted zoomed small
    python -m benchmarks.choose CHASE --model_path RUN/merged --reward_net NET --targets STARE

A target is a folder with masks, which measure and never train, or a look of the first test images of ARCADE. For each,
a mean teacher is trained on its images by `sa2va-rl grpo` with a good learning rate and with one that is too high;
every checkpoint is a candidate, and the start is one, too. A criterion sees no mask of the target. Its regret is the
Dice of the best candidate less that of the one it chooses, its change that of the choice less the start; the last row
chooses by Dice. Finished runs and measured checkpoints are not repeated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import tyro
from tqdm import tqdm

from benchmarks.common import show
from rl_reward_network.atomic_io import read_json, state_fingerprint, write_json
from rl_reward_network.cli.app import run
from rl_reward_network.cli.main import main as sa2va_rl
from rl_reward_network.grpo import checkpoint
from rl_reward_network.grpo.final_model import load_merged
from rl_reward_network.grpo.inputs import GRPOInputs, open_grpo_inputs
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.segmenter import Sa2VASegmenter, load_segmenter
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.rewards.learned import foreground_prob
from rl_reward_network.rewards.metrics import components, dice

LOOKS = {"inverted": 1.0, "zoomed": 0.6, "small": 2.0}  # sides of what is shown, in sides of the image
LOOK_IMAGES = 60
RATES = {"good": 1.0, "high": 30.0}  # times the learning rates of `full`
RATE = 1e-3
GAMMA = 1.4


@dataclass(frozen=True)
class Args:
    """Adapt to every target, measure every checkpoint, and show what each criterion chooses."""

    data_root: tyro.conf.Positional[Path]
    """Labelled images of home."""
    model_path: Path
    """Checkpoint with a side network, trained at home."""
    reward_net: Path
    """Reward network of home: the referee, which no adaptation changes."""
    targets: tuple[str, ...]
    """Folders with masks, or looks: inverted, zoomed, small."""
    steps: int = 60
    """Optimisation steps of an adaptation; 6 of them are candidates."""
    images: int = 24
    """At most this many images of a target, and of home, measure."""
    output_dir: Path = Path("outputs/choose")
    """Folder of the runs."""


def main(args: Args) -> None:
    """Make the missing runs, measure them, and show the table."""
    marks = [state_fingerprint(open_checkpoint(str(args.model_path)).tensors())[:8], args.reward_net.parent.name]
    folder_of_all = args.output_dir / f"{args.data_root.name}_{'_'.join(marks)}"
    checkpoint.SAVE_TOTAL_LIMIT = None  # type: ignore[assignment]  # every checkpoint is a candidate
    cases: dict[str, list[dict[str, float]]] = {}
    for target in args.targets:
        folder = folder_of_all / Path(target).name
        root = write_look(args, target, folder / "data") if target in LOOKS else Path(target)
        for kind, times in RATES.items():
            adapt(args, root, folder / kind, RATE * times)
            cases[f"{args.data_root.name} to {Path(target).name}, {kind} rate"] = candidates(args, root, folder / kind)
    show_candidates(cases)
    show_criteria(cases)


# ---- shifts and adaptations ------------------------------------------------------------------------------------------


def write_look(args: Args, look: str, folder: Path) -> Path:
    """A folder with the first test images of home in another look, and their masks."""
    if (folder / "annotations.json").exists():
        return folder
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    records, prompts = [], open_grpo_inputs(RunConfig(data_root=args.data_root, gpu=-1)).pick("test")
    for number, prompt in enumerate(prompts[:LOOK_IMAGES]):
        image, mask = prompt.load()
        assert mask is not None
        name = f"{look}_{number:03d}.png"
        grey = shown(255 - image if look == "inverted" else image, LOOKS[look])
        cv2.imwrite(str(folder / "images" / name), grey[..., ::-1])
        cv2.imwrite(str(folder / "masks" / name), shown(mask.astype(np.uint8) * 255, LOOKS[look]) // 128 * 255)
        records.append({"image": name, "mask_png": f"masks/{name}", "text": ["blood vessel"], "group": name})
    write_json(folder / "annotations.json", records)
    return folder


def shown(image: np.ndarray, part: float) -> np.ndarray:
    """uint8 (H, W, ...): the middle of an image, or an image with a black border, at the size of the image."""
    height, width = image.shape[:2]
    middle = np.array([[1, 0, (1 - 1 / part) * width / 2], [0, 1, (1 - 1 / part) * height / 2]])
    middle[:, :2] /= part
    return cv2.warpAffine(image, middle, (width, height), flags=cv2.INTER_AREA if part > 1 else cv2.INTER_LINEAR)


def adapt(args: Args, root: Path, folder: Path, rate: float) -> None:
    """A mean teacher on the images of a target, unless it is finished."""
    if (folder / "final_model").exists():
        return
    words = f"grpo full --objective mean_teacher --data_root {args.data_root} --unlabelled_root {root / 'images'}"
    words += f" --model_path {args.model_path} --learning_rate {rate:g} --side_learning_rate {rate:g} --eval_steps 0"
    words += f" --max_steps {args.steps} --save_steps {max(1, args.steps // 6)} --run_folder {folder}"
    sa2va_rl([*words.split(), *(["--resume"] if (folder / "config.json").exists() else [])])


# ---- candidates ------------------------------------------------------------------------------------------------------


def candidates(args: Args, root: Path, folder: Path) -> list[dict[str, float]]:
    """Dice, criteria and step of the start and of every checkpoint; criteria are better where they are higher."""
    target = [prompt for prompt in open_grpo_inputs(RunConfig(data_root=root, gpu=-1)).prompts if prompt.labelled]
    inputs = open_grpo_inputs(RunConfig(data_root=args.data_root, gpu=-1))
    referee, found = RewardNetwork.from_pretrained(args.reward_net), []
    steps = sorted(folder.glob("checkpoint-*"), key=_step)
    for path in [folder / "start", *steps]:
        file = folder / f"measured_{path.name}_{args.images}.json"
        if not file.exists():
            segmenter = load_segmenter(args.model_path) if path.name == "start" else merged_segmenter(path)
            values = measured(segmenter, target[: args.images], home_of(inputs)[: args.images], referee)
            write_json(file, {"last step": float(_step(path)), **values})
        found.append(read_json(file))
    collapsed = bool(read_json(folder / "final_model" / "config.json").get("collapse"))
    return [row | {"collapsed": float(collapsed)} for row in found]


def _step(path: Path) -> int:
    return int(path.name.partition("-")[2] or 0)


def home_of(inputs: GRPOInputs) -> list[TrainingItem]:
    """The labelled validation images of home."""
    return [prompt for prompt in inputs.pick("val") if prompt.labelled]


def merged_segmenter(path: Path) -> Sa2VASegmenter:
    """The moving average of a checkpoint."""
    model, processor, _ = load_merged(path)
    return Sa2VASegmenter(model, processor, 16, 64, str(path))


def measured(
    segmenter: Sa2VASegmenter, target: Sequence[TrainingItem], home: Sequence[TrainingItem], referee: RewardNetwork
) -> dict[str, float]:
    """Dice on the target; of each criterion its mean over the images."""
    rows = [one_image(segmenter, prompt, referee) for prompt in tqdm(target, "target", unit="image")]
    at_home = [soft_mask(segmenter, prompt.load()[0], prompt.question) > 0.5 for prompt in home]
    truths = [truth for prompt in home if (truth := prompt.load()[1]) is not None]
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    area, parts = np.median(columns.pop("area")), np.median(columns.pop("parts"))
    true_area, true_parts = (np.median([one(truth) for truth in truths]) for one in (np.mean, components))
    shape = abs(np.log((area + 1e-4) / (true_area + 1e-4))) + abs(np.log((parts + 1) / (true_parts + 1)))
    return {
        **{name: float(column.mean()) for name, column in columns.items()},
        "shape as at home": -float(shape),
        "validation at home": float(np.mean([dice(*pair) for pair in _pairs(at_home, truths)])),
    }


def one_image(segmenter: Sa2VASegmenter, prompt: TrainingItem, referee: RewardNetwork) -> dict[str, float]:
    """Of an image of the target the Dice, and what is known without its mask."""
    image, truth = prompt.load()
    assert truth is not None
    soft = soft_mask(segmenter, image, prompt.question)
    mask, bent = soft > 0.5, (255 * (image / 255.0) ** GAMMA).astype(np.uint8)
    flipped = soft_mask(segmenter, np.ascontiguousarray(image[:, ::-1]), prompt.question)[:, ::-1]
    views = [flipped, soft_mask(segmenter, bent, prompt.question)]
    others = {"consistency": [view > 0.5 for view in views], "referee": [foreground_prob(referee, image) > 0.5]}
    return {
        "dice": _dice(mask, truth),
        "confidence": float(2 * soft[mask].sum() / max(soft.sum() + mask.sum(), 1e-9)),
        "area": float(mask.mean()),
        "parts": float(components(mask)),
        **{name: float(np.mean([_dice(mask, other) for other in masks])) for name, masks in others.items()},
    }


def soft_mask(segmenter: Sa2VASegmenter, image: np.ndarray, question: str) -> np.ndarray:
    """float32 (H, W) in [0, 1]."""
    return segmenter.upsample(segmenter.segment(image, [question]).mask_logits, image.shape[:2])[0]


def _dice(mask: np.ndarray, other: np.ndarray) -> float:
    return float(dice(mask[None], other[None])[0])


def _pairs(masks: Sequence[np.ndarray], truths: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield from ((mask[None], truth[None]) for mask, truth in zip(masks, truths, strict=True))


# ---- tables ----------------------------------------------------------------------------------------------------------

NOT_WORSE = 0.05  # mean Dice at home that a candidate may lose
CRITERIA = ("last step", "validation at home", "confidence", "consistency", "referee", "shape as at home")


def choices(rows: list[dict[str, float]]) -> dict[str, int]:
    """Criterion -> index of the candidate that it chooses; 0 is the start."""
    chosen = {name: int(np.argmax([row[name] for row in rows])) for name in (*CRITERIA, "dice")}
    agrees = rows[-1]["referee"] > rows[0]["referee"] and not rows[0]["collapsed"]
    lost = rows[0]["validation at home"] - rows[-1]["validation at home"]
    kept = 0 if lost > NOT_WORSE or rows[0]["collapsed"] else len(rows) - 1
    rules = {"last step if the referee agrees more": (len(rows) - 1) * agrees}
    return {"keep the start": 0, **rules, "last step unless collapsed or worse at home": kept, **chosen}


def show_candidates(cases: dict[str, list[dict[str, float]]]) -> None:
    """Print the Dice of every candidate."""
    lines = [(case, *(f"{row['dice']:.3f}" for row in rows)) for case, rows in cases.items()]
    width = max(len(line) for line in lines)
    heads = ("shift", "start", *(f"checkpoint {number}" for number in range(1, width - 1)))
    show(heads, [(*line, *["-"] * (width - len(line))) for line in lines], "Dice on the target")


def show_criteria(cases: dict[str, list[dict[str, float]]]) -> None:
    """Print the regret of every criterion, and what its choice changes."""
    names, lines = list(choices(next(iter(cases.values())))), []
    for name in names:
        chosen = [(rows, rows[choices(rows)[name]]["dice"]) for rows in cases.values()]
        regret = np.array([max(row["dice"] for row in rows) - value for rows, value in chosen])
        change = np.array([value - rows[0]["dice"] for rows, value in chosen])
        harmed = f"{(change < -0.005).sum()} of {len(change)}"
        lines.append(
            (
                name,
                f"{regret.mean():.3f}",
                f"{regret.max():.3f}",
                f"{change.mean():+.3f}",
                f"{change.min():+.3f}",
                harmed,
            )
        )
    heads = ("chosen by", "mean regret", "largest regret", "mean change", "lowest change", "harmed by more than 0.005")
    show(heads, lines, f"{len(cases)} adaptations")


if __name__ == "__main__":
    run(main, Args)
