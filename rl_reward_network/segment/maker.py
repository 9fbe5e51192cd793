"""What makes masks, behind one function: `load_maker` loads a Sa2VA, a plain segmenter, a fusion or a run's choice.

`what_is` says what a path is, from its files alone. Each kind is a small dataclass with `answer`, a reward network that
predicts the quality of its masks, and the grey window of its images.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from stable_baselines3.common.policies import ActorCriticPolicy

from rl_reward_network.atomic_io import NAMES_ALONE, PICTURES, load_arrays, read_json, weights_fingerprint
from rl_reward_network.bit_depth import GreyWindow, window_for
from rl_reward_network.data.names import NamedClass
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.inputs.loading import located_model
from rl_reward_network.methods.compare import BY_NAME, METHOD_FILE, DeployedMethod, load_deployed
from rl_reward_network.methods.training import MERGED
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.lora import is_adapter
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.checkpoint_sa2va import TRAINABLE
from rl_reward_network.models.sa2va.generation_sa2va import Segmentation, image_features
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.loading_sa2va import Dtype, check_device, load_sa2va_model
from rl_reward_network.ppo.policy import deployed_prompt, load_policy, policy_folder, read_policy_config
from rl_reward_network.report.deployment import AS_IT_IS, Deployment
from rl_reward_network.reward_training.calibration import given_interval
from rl_reward_network.reward_training.masks import OWN, SEGMENTER
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.run import BEST_REWARD_NET, CONFIG, DEPLOYED, FINAL, IMPROVE_RUN, REWARD_NET

NO_MASK = "there is no mask, which is not an empty one: ask for a segmentation, or see sa2va-rl doctor"
NO_PROMPT = "the masks of this model do not depend on a prompt; leave it out"
NO_POLICY = {"max_tiles": None, "max_new_tokens": 64}  # limits of an answer where no run has set them
OWN_MASKS = "plain segmenter"  # stands where other masks have a prompt
FORMAT_VERSION = 1  # of `DEPLOYED`
KEPT = ("improved", "best", BEST_REWARD_NET, MERGED, FINAL)  # where a run has what it has made; first wins
MOST_NAMES = 8  # in a message

OF_ALL = ("device", "bit_depth")  # options that a Sa2VA and a plain segmenter share

Kind = Literal["Sa2VA", "trained tensors", "plain segmenter", "fusion", "method", "policy"]
Before = Callable[[str], None]


# ---- what a path is ----


class Recognised(NamedTuple):
    """What makes masks at a path."""

    kind: Kind
    path: str  # of its folder; the name of an embedded model, or a hub id
    prompt: str | None  # the default one, or what stands in its place; None where a policy chooses


def what_is(path: str | Path) -> Recognised:
    """What is at a path: a model's folder, name or hub id, or the folder of a run, in which its result is looked up.

    No weights are read. A ValueError for a folder without anything that makes masks: it lists what is there.
    """
    folder = Path(path)
    if folder.is_file():
        raise ValueError(f"{folder}: a file, expected a folder of what makes masks; name the folder that holds it")
    if not folder.is_dir():
        return Recognised("Sa2VA", str(path), PROMPTS[0])
    if folder.name == FINAL and _kind_of(folder.parent / MERGED) == "Sa2VA" and (folder / TRAINABLE).is_dir():
        folder = folder.parent / MERGED
    for place in (folder, *(folder / name for name in KEPT)):
        if kind := _kind_of(place):
            return Recognised(kind, str(place), _prompt_of(kind, place))
    if (folder / IMPROVE_RUN.end).is_file() and _config(folder).get("stage") == IMPROVE_RUN.stage:
        raise ValueError(
            f"{folder}: this run deploys nothing, since nothing was better than the model as it was; segment with that "
            "model (--model_path), or annotate images of more patients"
        )
    if any(folder.glob("checkpoint-*")):
        from rl_reward_network.grpo.final_model import grpo_model  # here, since the others need no trainer

        if last := grpo_model(folder):
            return Recognised("trained tensors", str(last), _question(last.parent))
    there = sorted(file.name for file in folder.iterdir())
    more = [f"{len(there) - MOST_NAMES} more"] if len(there) > MOST_NAMES else []
    raise ValueError(
        f"{folder}: nothing here makes masks; it holds {', '.join([*there[:MOST_NAMES], *more]) or 'no file'}, expected"
        f" a Sa2VA checkpoint, a reward network, {DEPLOYED}, or the folder of a finished run of improve,"
        " compare, reward, prompts or grpo"
    )


def trainable_model(path: str) -> str:
    """The Sa2VA that a training begins with: of a run that has deployed one its folder, else the path itself.

    A ValueError for a model of another kind; trained tensors are refused where they are opened, with their merge.
    """
    if not Path(path).is_dir():
        return path  # an embedded model, or a hub id
    found = what_is(path)
    if found.kind == "trained tensors":
        return path
    if found.kind == "fusion":
        places = [Path(found.path) / name for name in read_deployed(Path(found.path))["members"]]
        models = [place for place in places if _member_kind(place) == "Sa2VA"]
        if len(models) == len(places) == 1:
            return str(models[0])
        remedy = f"give its Sa2VA: {models[0]}" if models else "give the Sa2VA that it was trained beside"
        raise ValueError(f"{path}: --model_path is not a Sa2VA alone, whose weights can be trained; {remedy}")
    if found.kind != "Sa2VA":
        raise ValueError(
            f"{path}: --model_path is a {found.kind}, expected a Sa2VA, whose weights can be trained: give the Sa2VA"
            " that it was made of"
        )
    return found.path


def _kind_of(folder: Path) -> Kind | None:
    """What a folder itself is; None for a folder of something else, or none at all."""
    if (folder / DEPLOYED).is_file():
        return "fusion"
    return _member_kind(folder)


def _member_kind(folder: Path) -> Kind | None:
    """As `_kind_of`, without the file of a fusion, which may lie beside its only member."""
    if (folder / METHOD_FILE).is_file():
        return "method"
    if (folder / TRAINABLE).is_dir() or is_adapter(folder):
        return "trained tensors"
    config = _config(folder)
    if config and (folder / "policy.zip").is_file():
        return "policy"
    if "model_type" in config:
        return "Sa2VA"
    return "plain segmenter" if {"channels", "packing", "members"} <= config.keys() else None


def _prompt_of(kind: Kind, folder: Path) -> str | None:
    """The prompt of the masks, or what stands in its place; None where a policy chooses."""
    if kind == "fusion":
        saved = read_deployed(folder)
        alone = len(saved["members"]) == 1 and _member_kind(folder / saved["members"][0]) == "plain segmenter"
        return OWN_MASKS if alone else str(saved["prompt"])
    if kind == "method":
        method = BY_NAME.get(read_json(folder / METHOD_FILE).get("method"))
        return None if method is None else method.title  # an unknown one is refused when it is loaded
    return {"policy": None, "plain segmenter": OWN_MASKS}.get(kind, _question(folder.parent))


def _config(folder: Path) -> dict[str, Any]:
    """config.json of a folder; empty without one."""
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
    return config if isinstance(config, dict) else {}


def _question(run: Path) -> str:
    """The question of a run for its masks; the default prompt where the folder is no such run."""
    inputs = _config(run).get("inputs")
    return str(inputs.get("segment_question", PROMPTS[0])) if isinstance(inputs, dict) else PROMPTS[0]


def read_deployed(folder: Path) -> dict[str, Any]:
    """`deployed.json` of a folder; a ValueError for another format, or a member that is no folder."""
    file, saved = folder / DEPLOYED, read_json(folder / DEPLOYED)
    version = saved.get("format_version") if isinstance(saved, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"{file}: format_version is {version!r}, this version reads {FORMAT_VERSION}; update one")
    if missing := [name for name in ("prompt", "members") if not saved.get(name)]:
        raise ValueError(f"{file}: field {missing[0]} is missing; make the folder again: sa2va-rl improve")
    if not isinstance(saved["members"], list):
        raise ValueError(f"{file}: members is {saved['members']!r}, expected a list of folders; correct it there")
    for name in map(str, saved["members"]):
        if not (folder / name).is_dir():
            raise ValueError(f"{file}: members: {name} is no folder here; copy the whole folder again")
    return dict(saved)


def trained_on(path: str | None) -> np.ndarray | None:
    """Thumbnails of the images that trained what is at a path, int8 (N, SIDE, SIDE); None where they are not known."""
    folder = Path(what_is(path or DEFAULT_MODEL).path)
    members = read_deployed(folder)["members"] if (folder / DEPLOYED).is_file() else []
    places = [folder, *(folder / str(name) for name in members)]
    found = [load_arrays(place / PICTURES, NAMES_ALONE).get("train") for place in places]
    known = [pictures for pictures in found if pictures is not None]
    return np.concatenate(known) if known else None


# ---- answers ----


@dataclass(frozen=True, eq=False)
class Answered:
    """What a model says about one image."""

    prompt: str  # that was used, or chosen, or what stands in its place
    answer: str  # special tokens kept, in a fusion that of the first Sa2VA; "" where no Sa2VA is asked by one prompt
    segs: int | None  # number of `[SEG]` in the answer, 0 where no answer has one; None where no single answer counts
    soft: np.ndarray  # float32 (H, W) in [0, 1], maximum over the `[SEG]`
    scorer: ImageScorer | None  # the reward network applied to the image
    outside: str | None = None  # why a plain segmenter does not know such images
    source: str = SEGMENTER  # of the mask, for the reward network's interval

    @property
    def mask(self) -> np.ndarray:
        """bool (H, W): where the soft mask is above 0.5."""
        return np.asarray(self.soft > 0.5)


class Predicted(NamedTuple):
    """The quality of a mask as predicted by a reward network; None for what cannot be given."""

    dice: float | None
    low: float | None  # of the 90 % interval of the Dice
    high: float | None
    score: float | None
    reason: str | None  # why no number can be given

    def __str__(self) -> str:
        if self.dice is None:
            return f"none, {self.reason}"
        interval = " (no interval can be given)" if self.low is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.dice:.3f}{interval}, score {self.score:.3f}"


def predicted_quality(
    network: RewardNetwork, scorer: ImageScorer, mask: np.ndarray, source: str | None = SEGMENTER
) -> Predicted:
    """What a reward network, applied to an image, predicts for a mask (H, W), bool or float in [0, 1].

    Its interval is that of masks of a `source`, which are bool; None: of masks of which it knows nothing.
    """
    if scorer.outside:
        return Predicted(None, None, None, None, scorer.outside)
    quality = scorer.quality(mask[None].astype(np.float32))
    limits = "" if source is None else given_interval(network.config, scorer, mask, source)
    low, high = (None, None) if isinstance(limits, str) else limits
    return Predicted(float(quality["dice"][0]), low, high, float(quality["score"][0]), None)


def scorer_of(network: RewardNetwork | None, image: np.ndarray) -> ImageScorer | None:
    """A reward network applied to an image, uint8 (H, W, 3): its U-Nets run once; None without a network."""
    return None if network is None else ImageScorer(network, image)


def _refuse_prompt(prompt: str | None) -> None:
    if prompt is not None:
        raise ValueError(f"prompt {prompt!r}: {NO_PROMPT}")


def _nothing(prompt: str) -> None:
    pass


@dataclass(frozen=True)
class MaskMaker:
    """A loaded Sa2VA, with the policy that chooses the prompt and the reward network that predicts a mask's quality."""

    model: Any
    processor: Any
    max_new_tokens: int
    prompt: str  # where no policy chooses
    trained: dict[str, Any]  # config.json of the policy's final_model; empty without a policy
    policy: ActorCriticPolicy | None
    network: RewardNetwork | None
    grey: GreyWindow | None = None  # window of grey above 8 bit; None: each image has its own

    def answer(self, image: np.ndarray, prompt: str | None = None, before: Before = _nothing) -> Answered:
        """The answer to a prompt, or the policy's or own one, which `before` is told, on an image, uint8 (H, W, 3)."""
        features = image_features(self.model, self.processor, [image])  # used for both the policy and the masks
        scorer = scorer_of(self.network, image)
        prompt = prompt or self._choose(image, features, scorer)
        before(prompt)
        answer = self._segment(image, features, prompt)
        return Answered(prompt, answer.answer, len(answer.mask_logits), _joined(answer), scorer)

    def answer_prompts(self, image: np.ndarray, prompts: Sequence[str]) -> list[Answered]:
        """The answers to several prompts on an image, uint8 (H, W, 3), which is encoded once."""
        scorer, limits = scorer_of(self.network, image), {"max_new_tokens": self.max_new_tokens}
        (answers,) = self.model.segment([image], list(prompts), self.processor, **limits)
        return [
            Answered(prompt, answer.answer, len(answer.mask_logits), _joined(answer), scorer)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def answers(self, image: np.ndarray, classes: Sequence[NamedClass], threshold: float = 0.5) -> list[Answered]:
        """The answers to the first wording of each class on an image, uint8 (H, W, 3), which is encoded once.

        A class that another one rules out, with a mask where it is above `threshold`, has an empty one.
        """
        from rl_reward_network.grpo.competition import without_excluded  # here, since the others need no trainer
        from rl_reward_network.grpo.image_context import FeatureCache, open_batch
        from rl_reward_network.grpo.prompts import class_prompt

        prompts = [class_prompt(one, image) for one in classes]
        batch, texts = open_batch(prompts, FeatureCache(self.model, self.processor)), [one.question for one in prompts]
        asked = batch.masks(batch.context(self.model), range(len(prompts)), texts)
        nothing = np.zeros(image.shape[:2], np.float32)
        return [
            Answered(text, "", int(mask is not None), nothing if mask is None else mask, None)
            for text, mask in zip(texts, without_excluded(prompts, asked, threshold), strict=True)
        ]

    def _segment(self, image: np.ndarray, features: Sam2Features, prompt: str) -> Segmentation:
        limits: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "sam_features": [features]}
        answer: Segmentation = self.model.segment([image], [prompt], self.processor, **limits)[0][0]
        return answer

    def _choose(self, image: np.ndarray, features: Sam2Features, scorer: ImageScorer | None) -> str:
        if self.policy is None:
            return self.prompt
        prompts, pooled = self.trained["prompts"], features.pooled()[0].cpu().float().numpy()

        def score(index: int) -> float:
            if scorer is None:
                raise ValueError(
                    "--policy: it tries several prompts, but its reward network is missing; give --reward_net"
                )
            mask = (_joined(self._segment(image, features, prompts[index])) > 0.5).astype(np.float32)
            return float(scorer.quality(mask[None])["score"][0])

        return str(prompts[deployed_prompt(self.policy, self.trained, image, pooled, score)])


def _joined(answer: Segmentation) -> np.ndarray:
    """float32 (H, W): the soft masks of several `[SEG]` are joined; none is an empty mask."""
    return np.asarray(answer.probabilities().max(axis=0, initial=0.0))


@dataclass(frozen=True)
class PlainSegmenter:
    """A reward network, or an ensemble of U-Nets, as a segmenter: its own map of the foreground."""

    segmenter: RewardNetwork
    network: RewardNetwork | None = None
    grey: GreyWindow | None = None
    prompt: str = OWN_MASKS

    def answer(self, image: np.ndarray, prompt: str | None = None, before: Before = _nothing) -> Answered:
        """The own mask of an image, uint8 (H, W, 3)."""
        _refuse_prompt(prompt)
        before(self.prompt)
        seen = ImageScorer(self.segmenter, image)
        scorer = seen if self.network is self.segmenter else scorer_of(self.network, image)
        source = OWN if scorer is seen else SEGMENTER
        return Answered(self.prompt, "", None, seen.foreground_prob, scorer, seen.outside, source)


@dataclass(frozen=True)
class ComparedMethod:
    """The method that a comparison has chosen."""

    method: DeployedMethod
    network: RewardNetwork | None = None
    grey: GreyWindow | None = None

    @property
    def prompt(self) -> str:
        """The title of the method."""
        return self.method.method.title

    def answer(self, image: np.ndarray, prompt: str | None = None, before: Before = _nothing) -> Answered:
        """The mask of an image, uint8 (H, W, 3)."""
        _refuse_prompt(prompt)
        before(self.prompt)
        soft = self.method.soft(image)
        segs, found = (0, np.zeros(image.shape[:2])) if soft is None else (None, soft)
        return Answered(self.prompt, "", segs, found.astype(np.float32), scorer_of(self.network, image))


@dataclass(frozen=True)
class Fusion:
    """Several models, whose soft masks are averaged."""

    members: tuple["Maker", ...]
    prompt: str
    network: RewardNetwork | None = None
    grey: GreyWindow | None = None

    def answer(self, image: np.ndarray, prompt: str | None = None, before: Before = _nothing) -> Answered:
        """The mask of an image, uint8 (H, W, 3); those of the members that can be asked are asked the prompt."""
        asked = [isinstance(member, MaskMaker) for member in self.members]
        if not any(asked):
            _refuse_prompt(prompt)
        prompt = prompt or self.prompt
        before(prompt)
        answers = [
            member.answer(image, prompt if ask else None) for member, ask in zip(self.members, asked, strict=True)
        ]
        soft = np.asarray(np.mean([answer.soft for answer in answers], axis=0, dtype=np.float32))
        none = all(answer.segs == 0 for answer in answers)
        text = next((answer.answer for answer in answers if answer.answer), "")  # of the first that can be asked
        outside = next((answer.outside for answer in answers if answer.outside), None)
        return Answered(prompt, text, 0 if none else None, soft, scorer_of(self.network, image), outside)


Maker = MaskMaker | PlainSegmenter | ComparedMethod | Fusion


# ---- loading ----


def load_maker(path: str | None = None, prompt: str | None = None, policy: Path | None = None, **options: Any) -> Maker:
    """Load what makes masks at a path, see `what_is`; by default the embedded model.

    Args:
        path: as in `what_is`; with a `policy` the model that it is applied to, None: that of its run.
        prompt: in place of the default one.
        policy: as in `load_mask_maker`.
        options: `reward_net`, `device`, `bit_depth`, and of a Sa2VA alone `max_tiles`, `dtype` and `image_resize`; see
            `load_mask_maker`.

    Raises:
        ValueError: as `what_is`; a prompt or an option that has no effect; damaged or missing files.
    """
    if policy is None:
        found = what_is(path or DEFAULT_MODEL)
        path, policy = (None, Path(found.path)) if found.kind == "policy" else (path, None)
    if policy is not None:
        if prompt is not None:
            raise ValueError(f"prompt {prompt!r} and {policy}: the policy chooses the prompt; give one")
        return load_mask_maker(path, PROMPTS[0], policy, **options)
    if found.kind == "fusion":
        return _load_fusion(Path(found.path), prompt, options)
    return _load_kind(found.kind, found.path, prompt or found.prompt, prompt, options)


def _load_kind(kind: Kind, path: str, default: str | None, prompt: str | None, options: dict[str, Any]) -> Maker:
    """As `load_maker`, of a path of known kind that is neither a policy nor a fusion."""
    if kind in ("Sa2VA", "trained tensors"):
        return load_mask_maker(path, default or PROMPTS[0], **options)
    _refuse_prompt(prompt)
    return _load_promptless(kind, Path(path), **options)


def _load_promptless(
    kind: Kind,
    folder: Path,
    reward_net: Path | None = None,
    device: str | None = None,
    bit_depth: int | None = None,
    **of_sa2va: Any,
) -> Maker:
    """A comparison's method, or a plain segmenter."""
    if given := [name for name, value in of_sa2va.items() if value is not None]:
        raise ValueError(f"{folder}: {given[0]} is for a Sa2VA, and this is a {kind}; leave it out")
    device = device or first_device()
    check_device(device)
    network = load_reward_network(reward_net, None, device)
    if kind == "method":
        method = load_deployed(folder, device)
        return ComparedMethod(method, without_intervals(network), window_for(method.saved, bit_depth))
    segmenter = RewardNetwork.from_pretrained(folder).to(device)
    itself = network is not None and network.fingerprint == segmenter.fingerprint
    grey = window_for({}, bit_depth)
    return PlainSegmenter(segmenter, segmenter if itself else without_intervals(network), grey)


def _load_fusion(folder: Path, prompt: str | None, options: dict[str, Any]) -> Maker:
    """The model of `deployed.json`: its only member, or the fusion of several."""
    saved, members = read_deployed(folder), list[Maker]()
    grey = window_for(saved, options.get("bit_depth"))
    judge = options.get("reward_net") or (folder / saved["reward_net"] if saved.get("reward_net") else None)
    alone, default = len(saved["members"]) == 1, prompt or str(saved["prompt"])
    for place in [folder / name for name in saved["members"]]:
        kind = _member_kind(place)
        if kind not in ("Sa2VA", "trained tensors", "plain segmenter"):
            raise ValueError(f"{folder / DEPLOYED}: members: {place} is neither a Sa2VA nor a reward network")
        of_kind = options if alone or kind != "plain segmenter" else {name: options.get(name) for name in OF_ALL}
        given = {**of_kind, "reward_net": judge if alone else None}
        members.append(_load_kind(kind, str(place), default, prompt if alone else None, given))
    if alone:
        return replace(members[0], grey=grey)
    network = load_reward_network(judge, None, options.get("device") or first_device())
    return Fusion(tuple(members), default, without_intervals(network), grey)


def load_mask_maker(
    model_path: str | None,
    prompt: str,
    policy: Path | None = None,
    reward_net: Path | None = None,
    device: str | None = None,
    max_tiles: int | None = None,
    bit_depth: int | None = None,
    dtype: Dtype | None = None,
    image_resize: str | None = None,
) -> MaskMaker:
    """Load policy, reward network and Sa2VA, in this order: the largest last.

    Args:
        model_path: a checkpoint, or what a GRPO run has trained, which is merged in memory; None as below.
        reward_net, max_tiles, dtype, image_resize: None is as in the policy's training; without a policy the embedded
            model, no network, what the model's config says, and "auto".
        prompt: used where no policy chooses.
        policy: a run of step 2, or its final_model folder.
        device: None is the first GPU if there is one, else the CPU.
        bit_depth: of grey images above 8 bit.
    """
    device = device or first_device()
    check_device(device)
    folder, trained, chooser = None, dict[str, Any](), None
    if policy is not None:
        folder = policy_folder(policy)
        trained = read_policy_config(folder)
        if not trained["deployment"]:
            raise ValueError(f"{folder}: a row of a report, not a policy to use; name the run {folder.parents[1]}")
        deployment = Deployment.from_json(trained["deployment"])
        print(f"the run deploys {deployment.words('best fixed prompt')}, because {deployment.reason}")
        chooser = load_policy(folder) if deployment.choice == "policy" else None
        prompt = str(trained["prompts"][deployment.best_fixed if deployment.choice == "fixed" else AS_IT_IS])
    network = load_reward_network(reward_net, folder, device)
    limits = trained.get("inputs", NO_POLICY)
    path = model_path or default_model(policy)
    model, processor = _load_sa2va(path, device, dtype or limits.get("dtype", "auto"))
    tiles = limits["max_tiles"] if max_tiles is None else max_tiles
    processor.max_tiles = tiles or processor.max_tiles
    processor.set_image_resize(image_resize or limits.get("image_resize"))
    weights = weights_fingerprint(model) if trained or network else ""
    if trained and not trained["model_fingerprint"].startswith(weights):
        warnings.warn(f"{folder}: trained on other weights, or on another kind of device, than these", stacklevel=2)
    if network and not str(network.training_info.get("model_fingerprint")).startswith(weights):
        network = without_intervals(network)
    grey = window_for(limits, bit_depth)
    return MaskMaker(model, processor, limits["max_new_tokens"], prompt, trained, chooser, network, grey)


def _load_sa2va(path: str, device: str, dtype: Dtype) -> tuple[Any, Any]:
    """Model and processor of a checkpoint, or of what a GRPO run has trained beside one."""
    folder = Path(path)
    if folder.is_dir() and _member_kind(folder) == "trained tensors":
        from rl_reward_network.grpo.final_model import load_merged  # here, since the others need no trainer

        return load_merged(folder, device=device, dtype=dtype)[:2]
    return load_sa2va_model(path, device, dtype=dtype)


def first_device() -> str:
    """The first GPU if there is one, under torchrun that of this process, else the CPU."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def default_model(policy: Path | None) -> str:
    """The model of the policy's run; without a policy the embedded one."""
    if policy is None:
        return DEFAULT_MODEL
    folder = policy_folder(policy)
    return located_model(folder.parent, read_policy_config(folder), "--model_path")


def load_reward_network(path: Path | None, policy: Path | None, device: str) -> RewardNetwork | None:
    """The reward network at `path`, else the one in the run of the final_model folder `policy`; None if it has none."""
    if policy is not None and (policy.parent / REWARD_NET).exists():
        path = path or policy.parent / REWARD_NET
    return None if path is None else RewardNetwork.from_pretrained(path).to(device)


def without_intervals(network: RewardNetwork | None) -> RewardNetwork | None:
    """The network without its intervals: they hold for masks of the weights that they were fitted to.

    Masks of a model that was trained on the score are worse than predicted.
    """
    if network is not None and network.config.intervals:
        print("intervals are left out: they were fitted to masks of other weights, or of another kind of device")
        network.config = replace(network.config, intervals={})
    return network
