"""Which prompt the reward network's score chooses under other weights of its four numbers.

python -m benchmarks.score_weights outputs/RUN/best_reward_net     # after run_step2_finetune.sh; seconds
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import open_inputs
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.report.metrics import measure_sample
from rl_reward_network.rewards.learned import ForegroundMaps

WEIGHTS = ((1, 0, 0, 0), (0.25, 0.25, 0.25, 0.25), (0.5, 0, 0, 0.5), (0, 0, 0, 1))  # Dice, IoU, precision, recall


@dataclass(frozen=True)
class Args:
    """The score of a reward network under other weights."""

    folder: tyro.conf.Positional[Path]
    """The trained network, in its run."""
    data_root: Path = Path("data/angiograms")
    """The images of the run."""


def main(args: Args) -> None:
    """Print the mean Dice and recall of the chosen masks on 20 training and 24 validation images of quick."""
    folder = args.folder
    inputs = open_inputs(RunConfig(data_root=args.data_root, output_dir=folder.parents[1]))
    network = RewardNetwork.from_pretrained(folder)
    maps, members, truth = ForegroundMaps.beside(folder.parents[1] / "contexts", network), [], []
    for sample in inputs.pick("policy", 20) + inputs.pick("val", 24):
        image = sample.load_image()
        masks = inputs.segmenter.upsample(inputs.bank.answer(image).mask_logits, image.shape[:2]) > 0.5
        quality = maps.scorer(image).quality(masks.astype(np.float32))
        metrics = measure_sample(sample.sample_id, "", quality["score"], masks, sample.load_mask()).metrics or {}
        members.append(quality["members"])
        truth.append(np.stack([metrics["dice"], metrics["recall"]]))
    numbers, gold = np.stack(members), np.stack(truth)  # (N, P, K, 4), (N, 2, P)
    for weights in WEIGHTS:
        scores = numbers @ np.array(weights)
        chosen = (scores.mean(axis=2) - network.config.caution * scores.std(axis=2)).argmax(axis=1)
        dice, recall = gold[np.arange(len(gold)), :, chosen].mean(axis=0)
        print(f"weights {weights}: Dice {dice:.3f}, recall {recall:.3f}")


if __name__ == "__main__":
    main(tyro.cli(Args))
