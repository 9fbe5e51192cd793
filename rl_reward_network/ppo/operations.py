"""The stage of experiment 2: the soft masks of the frozen model, the searches, PPO, and what is deployed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor
from tqdm import tqdm

from rl_reward_network.data.items import Sample
from rl_reward_network.env.mask_bank import FrozenAnswer, MaskBank
from rl_reward_network.env.observation import (
    EPISODE_FEATURES,
    EdgeFeatures,
    mask_observation_table,
    observation_table,
    observe_image,
)
from rl_reward_network.env.operations import OPERATIONS, EditedImage, Operations
from rl_reward_network.env.post_process_env import PostProcessEnv, observe
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.ppo.policy import choose_operations, policy_kwargs
from rl_reward_network.ppo.search import best_sequences, best_threshold, sequences_for_ridge, words
from rl_reward_network.ppo.settings import Mode, PostReward, PPOSettings, operation_settings
from rl_reward_network.ppo.stage import Trained, complete_run, donors, judged_out_of_fold
from rl_reward_network.ppo.train import Task, train_ppo
from rl_reward_network.report.deployment import Deployment, Labels, can_decide, decide
from rl_reward_network.report.statistics import known_means
from rl_reward_network.reward_training.stage import check_no_leak
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.run import Run, clock

IMAGES = {"quick": 96, "full": 240}
VAL_IMAGES = {"quick": 48, "full": 100}
SEARCHED = 48  # images of the searches for sequences and of the decision
LEAST_STD = 1e-3  # a number that is constant in training must not amplify noise
SHORTER = 6  # times fewer operations in a fit for the decision: at first, each costs milliseconds on an image


@dataclass(frozen=True)
class PostPlan:
    """Settings of experiment 2.

    Args:
        mode: quick or full.
        images: training images at most.
        val_images: images of the validation.
        vision_features: whether the observation has Sa2VA's pooled image features.
        reward: dice, dice+recall, or net, the reward network's score.
        shuffle_rewards: the control: each training image is rewarded by the true mask of another.
        ppo: settings of PPO.
    """

    mode: str
    images: int
    val_images: int
    vision_features: bool
    reward: PostReward
    shuffle_rewards: bool
    ppo: PPOSettings


def post_plan(
    mode: Mode,
    reward: PostReward = "dice",
    seed: int = 0,
    ppo: PPOSettings | None = None,
    shuffle_rewards: bool = False,
) -> PostPlan:
    """The preset of the mode, with the user's changes.

    Raises:
        ValueError: settings that do not go together.
    """
    if shuffle_rewards and reward == "net":
        raise ValueError("--shuffle_rewards exchanges true masks between images, and --reward net has none; use dice")
    settings = (ppo or operation_settings(mode)).of_run(seed)
    return PostPlan(mode, IMAGES[mode], VAL_IMAGES[mode], True, reward, shuffle_rewards, settings)


def rewarded_by(reward: str, network: bool) -> str:
    """What rewards PPO, in a sentence; `network` is whether a reward network is given."""
    if reward == "net":
        return "PPO is rewarded by the reward network's score, also on labelled images."
    return f"PPO is rewarded by true masks ({reward}){'; the reward network only stands in the report' * network}."


def run_post_stage(inputs: RunInputs, plan: PostPlan, reward_net: Path | None, run: Run) -> None:
    """Train the post-processing policy in `run`; an interrupted run is resumed from its last checkpoint.

    Writes final_model/, reward_net/ (a copy, where there is one), config.json, split.json, checkpoint.pt,
    metrics.jsonl, cost.json and logs/.

    Args:
        inputs: data, split, frozen model and its masks.
        plan: settings.
        reward_net: folder of a reward network; needed for the reward `net` alone.
        run: new, or interrupted.

    Raises:
        ValueError: the reward network is missing or was trained on patients of this run, no image is labelled, or as
            `complete_run`.
    """
    network = None if reward_net is None else RewardNetwork.from_pretrained(reward_net)
    if plan.reward == "net" and network is None:
        raise ValueError("reward net: there is no reward network; give --reward_net, or use --reward dice")
    if network is not None and reward_net is not None:
        # of one that only stands in the report, too
        check_no_leak(inputs.split, network, reward_net, samples=inputs.samples)
    print(rewarded_by(plan.reward, network is not None))
    samples = post_samples(inputs, plan)

    def train(seconds: dict[str, float]) -> Trained:
        rewards = network.to(inputs.config.device) if network is not None and plan.reward == "net" else None
        maps = None if rewards is None else ForegroundMaps.beside(run.path, rewards)
        with clock(seconds, "masks"):
            images, val = (edited_images(inputs, plan, samples[name], maps, name) for name in ("train", "val"))
            if maps is not None:
                images, val = (with_scores(part, name) for part, name in ((images, "training"), (val, "validation")))
        with clock(seconds, "searches"):
            searched = searched_images(images, val)  # in the control, too: PPO alone is rewarded otherwise
            sequences = list(best_sequences(searched, plan.ppo.max_steps))
            fixed = sequences[0]
            for_ridge = sequences_for_ridge(searched, fixed, plan.ppo.max_steps)
            threshold = best_threshold(images)
        with clock(seconds, "PPO"):
            model = fit(images, val, plan, run.path)
        with clock(seconds, "decision"):
            deployment = decide_operations((images, val), searched, sequences, plan)
        vision = default_answer(inputs, samples["val"][0].load_image()).vision_features
        image = observation_table(len(vision) if plan.vision_features else 0)[:-EPISODE_FEATURES]
        facts = {
            "fixed_sequence": list(fixed),
            "best_threshold": threshold,
            "sequences": [list(operations) for operations in for_ridge],
            "observation": [entry.name for entry in (*image, *mask_observation_table())],
            "operations": list(OPERATIONS),
        }
        return Trained(model, deployment, labels_used(inputs, (images, val), searched, plan), facts)

    complete_run(run, inputs, run_settings(inputs, plan, network), network, {"plan": asdict(plan)}, train)


def post_samples(inputs: RunInputs, plan: PostPlan) -> dict[str, list[Sample]]:
    """The images to train and to validate on.

    Where labels reward, the patients of the reward network's training are used as well: no network judges them here.

    Raises:
        ValueError: there are none, or a file is damaged.
    """
    if plan.reward == "net":
        return {"train": inputs.pick("policy", plan.images), "val": inputs.pick("val", plan.val_images)}
    halves = [inputs.pick(name, plan.images // 2, labelled=True) for name in ("reward", "policy")]
    return {"train": halves[0] + halves[1], "val": inputs.pick("val", plan.val_images, labelled=True)}


def edited_images(
    inputs: RunInputs, plan: PostPlan, samples: Sequence[Sample], maps: ForegroundMaps | None, desc: str
) -> list[EditedImage]:
    """Images with the soft mask of the default prompt, ready to be edited."""
    return [_edited(inputs, plan, sample, maps) for sample in tqdm(samples, f"masks of {desc}", unit="image")]


def with_scores(images: list[EditedImage], desc: str) -> list[EditedImage]:
    """The images that the reward network can judge; prints how many it cannot.

    Raises:
        ValueError: there are none.
    """
    outside = [image.scorer.outside for image in images if image.scorer is not None and image.scorer.outside]
    if outside:
        found = f"{len(outside)} of {len(images)} {desc} images have no learned reward and are left out: {outside[0]}"
        if len(outside) == len(images):
            raise ValueError(found)
        print(found)
    return [image for image in images if image.scorer is None or image.scorer.outside is None]


def _edited(inputs: RunInputs, plan: PostPlan, sample: Sample, maps: ForegroundMaps | None) -> EditedImage:
    image = sample.load_image()
    answer = default_answer(inputs, image)
    soft = inputs.segmenter.upsample(answer.mask_logits, image.shape[:2])[0]
    features = observe_image(image, answer.vision_features if plan.vision_features else None)
    scorer = None if maps is None else maps.scorer(image)
    truth = sample.load_mask()
    return EditedImage(
        sample.sample_id, sample.group_id, EdgeFeatures(image), soft, features, truth, scorer, plan.reward
    )


def default_answer(inputs: RunInputs, image: np.ndarray) -> FrozenAnswer:
    """Sa2VA's answer to the default prompt alone, from the mask bank; image is uint8 (H, W, 3)."""
    whole = inputs.bank
    return MaskBank(whole.folder, whole.segment, whole.fingerprint, inputs.prompts[:1]).answer(image)


def shuffled(train: Sequence[EditedImage], seed: int) -> list[EditedImage]:
    """The images, each rewarded by the true mask of another one of the same size."""
    exchanged = []
    for image, index in zip(train, donors(len(train), seed), strict=True):
        donor = train[index].truth
        assert donor is not None
        if donor.shape != image.soft.shape:
            raise ValueError("--shuffle_rewards: the images have different sizes, so no truth fits another image")
        exchanged.append(replace(image, rewarded_by=donor))
    return exchanged


def fit(train: Sequence[EditedImage], val: Sequence[EditedImage], plan: PostPlan, run: Path) -> PPO:
    """PPO on the training images, which in the control are rewarded by those of others; curves go into `run`."""
    rewarded = shuffled(train, plan.ppo.seed) if plan.shuffle_rewards else train
    return train_post_policy(rewarded, val, plan.ppo, run)


def train_post_policy(
    train_images: Sequence[EditedImage], val_images: Sequence[EditedImage], settings: PPOSettings, run_dir: Path
) -> PPO:
    """Train a post-processing policy, as `train_ppo`; it ends with the weights of the best validation reward.

    Args:
        train_images: training images with their rewards; observations are standardised by their unchanged masks.
        val_images: images for validating the greedy policy after each rollout.
        settings: of PPO.
        run_dir: run folder; made when missing.
    """

    def validate(policy: BasePolicy) -> dict[str, list[float]]:
        """Reward of each validation patient, and Dice of each labelled one."""
        pairs = list(zip(val_images, choose_operations(policy, val_images, settings.max_steps), strict=True))
        dices = [np.nan if image.truth is None else image.dice(operations) for image, operations in pairs]
        rewards = [image.worth(operations) for image, operations in pairs]
        groups = [image.group_id for image in val_images]
        return {"custom/val_reward": known_means(rewards, groups), "custom/val_gt_dice": known_means(dices, groups)}

    venv = VecMonitor(DummyVecEnv([lambda: PostProcessEnv(train_images, settings.max_steps)] * settings.n_envs))
    venv.seed(settings.seed)
    observations = np.stack([observe(image, (), settings.max_steps) for image in train_images])
    task = Task(venv, standardised(observations), validate, "custom/val_reward", "best", True, True)
    return train_ppo(task, settings, run_dir)


def standardised(observations: np.ndarray) -> dict[str, Any]:
    """SB3's `policy_kwargs` for a policy that standardises by these observations, float32 (N, D).

    The state of the episode (progress, and the use of each operation but stop) is left as it is.
    """
    mean, std = observations.mean(axis=0), np.maximum(observations.std(axis=0), LEAST_STD)
    mean[-len(OPERATIONS) :], std[-len(OPERATIONS) :] = 0.0, 1.0
    return policy_kwargs(mean, std)


def searched_images(train: Sequence[EditedImage], val: Sequence[EditedImage]) -> list[EditedImage]:
    """At most `SEARCHED` images, one per patient before a second.

    They are labelled. Where others are not, and these are of too few patients for a decision, all training images.
    """
    everything = (*train, *val)
    labelled = [image for image in everything if image.truth is not None]
    enough = len(labelled) == len(everything) or can_decide([image.group_id for image in labelled])
    images = labelled if enough else train
    seen: Counter[str] = Counter()

    def turn(image: EditedImage) -> int:
        seen[image.group_id] += 1
        return seen[image.group_id]

    return sorted(images, key=turn)[:SEARCHED]


def decide_operations(
    images: tuple[Sequence[EditedImage], Sequence[EditedImage]],
    searched: Sequence[EditedImage],
    sequences: Sequence[Operations],
    plan: PostPlan,
) -> Deployment:
    """What is deployed: the policy, the best fixed sequence, or the masks as they are.

    All are measured by Dice on the labelled images among those of the search. PPO is judged out of fold, by fits
    `SHORTER` times as short.

    Args:
        images: for training, and for validation.
        searched: see `searched_images`.
        sequences: which the search has tried there, the best by the reward first.
        plan: settings.
    """
    labelled = [image for image in searched if image.truth is not None]
    groups, tried = [image.group_id for image in labelled], [(), *(one for one in sequences if one)]
    values = np.array([[image.dice(operations) for image in labelled] for operations in tried])
    by = f"{words(sequences[0])}, by the reward on {len({image.group_id for image in searched})} patients"
    steps = max(plan.ppo.total_timesteps // SHORTER, plan.ppo.fewest_timesteps)
    shorter = replace(plan, ppo=replace(plan.ppo, total_timesteps=steps))

    def refit(patients: frozenset[str], folder: Path) -> PPO:
        train, val = ([image for image in part if image.group_id not in patients] for part in images)
        return fit(train if len(train) > 1 else train + val, val or train, shorter, folder)

    def dice(model: PPO, indices: np.ndarray) -> np.ndarray:
        held = [labelled[index] for index in indices]
        chosen = choose_operations(model, held, plan.ppo.max_steps)
        return np.array([image.dice(operations) for image, operations in zip(held, chosen, strict=True)])

    policy = judged_out_of_fold(groups, refit, dice, "shorter")
    return decide(values, policy, groups, (tried.index(sequences[0]), by), "best fixed sequence", plan.ppo.seed)


def labels_used(
    inputs: RunInputs,
    images: tuple[Sequence[EditedImage], Sequence[EditedImage]],
    searched: Sequence[EditedImage],
    plan: PostPlan,
) -> Labels:
    """The labelled images by use, besides those of the reward network."""

    def counted(used: Sequence[EditedImage]) -> dict[str, int]:
        counts = {
            name: sum(image.group_id in ids and image.truth is not None for image in used)
            for name, ids in inputs.split.groups.items()
        }
        return {name: count for name, count in counts.items() if count}

    by_labels = plan.reward != "net"
    return {
        "reward": counted(images[0]) if by_labels else {},
        "weights": counted(images[1]) if by_labels else {},
        "deployment": counted(searched),
    }


def run_settings(inputs: RunInputs, plan: PostPlan, network: RewardNetwork | None = None) -> dict[str, Any]:
    """The settings that a run to resume must share; of a network only one that rewards."""
    return {
        **asdict(plan),
        "data_fingerprint": inputs.data_fingerprint,
        "model_fingerprint": inputs.segmenter.fingerprint,
        "prompt": inputs.prompts[0],
        "split_seed": inputs.split.seed,
        "reward_net": network.fingerprint if network is not None and plan.reward == "net" else None,
    }
