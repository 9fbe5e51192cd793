"""A tiny Sa2VA of our own in the original layout, random weights that talk, so that every path can run in seconds; and
what several files of tests need to run commands as a user does.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
os.environ.pop("SA2VA_RL_TYPED", None)  # set by run_tests.sh: the tests type commands of their own

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from rl_reward_network.embedded.angiograms import TREE, Angiogram
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import RunInputs, open_inputs
from rl_reward_network.models.sa2va.checkpoint_sa2va import to_original
from rl_reward_network.models.sa2va.configuration_sa2va import config_from_original
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.ppo.settings import PPOSettings
from rl_reward_network.reward_training.stage import RewardPlan, reward_plan, run_reward_stage
from rl_reward_network.run import BEST_REWARD_NET, POLICY_RUN, POST_RUN, REWARD_RUN, Run
from scripts.environment import lacking

ROOT = Path(__file__).resolve().parents[1]
settings.register_profile("same", derandomize=True, deadline=None, database=None)  # the same examples in each run
settings.load_profile("same")
SHARED = ROOT.parent / "shared"
GOLDEN = SHARED / "golden" / "case_a"
CHASE = SHARED / "realdata" / "chase_db1"
needs_golden = pytest.mark.skipif(not GOLDEN.exists(), reason="the official model's reference outputs are not here")
needs_chase = pytest.mark.skipif(not CHASE.exists(), reason="the CHASE_DB1 photographs are not here")

STAMP = ".rl_reward_network_installed"
SMALLEST = ["--total_timesteps", "64", "--reward_steps", "4"]  # of the main job: under a minute
SPECIAL = [
    *("<|im_end|>", "<|endoftext|>", "<|im_start|>", "<img>", "</img>", "<IMG_CONTEXT>"),
    *("<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>", "[SEG]", "<p>", "</p>", "<vp>", "</vp>"),
]
ANSWER = ["\n", "S", "u", "r", "e", " ", "[SEG]", ".", "<|im_end|>"]  # the chain the tiny model is taught to say
TINY_SAM = {
    "embed_dim": 8,
    "num_heads": 1,
    "stages": [1, 1, 2, 1],
    "global_att_blocks": [3],
    "bkg": [7, 7],
    "window_spec": [8, 4, 16, 8],
    "d_model": 32,
    "mem_ff": 48,
    "mem_layers": 1,
    "mem_dim": 64,
    "image_size": 256,
}
TINY_SAM3 = {
    **{"embed_dim": 16, "num_heads": 2, "depth": 3, "mlp_dim": 24, "global_att_blocks": [1], "window_size": 4},
    **{"pretrain_image_size": 56, "d_model": 32, "mem_ff": 48, "mem_layers": 1, "mem_dim": 64, "image_size": 112},
}
TINY_SAM_WITH_MEMORY = TINY_SAM | {"d_model": 64}  # object pointers are cut into tokens of the memory's width


def tiny_tokenizer() -> Qwen2Tokenizer:
    """Bytes and special tokens only."""
    vocab = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


def tiny_config(vocab_size: int) -> dict[str, Any]:
    """An original `config.json` at toy size, with only the fields the reference reads."""
    return {
        "architectures": ["Sa2VAChatModel"],
        "auto_map": {"AutoModel": "modeling_sa2va_chat.Sa2VAChatModel"},  # as in releases; must never be followed
        "model_type": "sa2va_chat",
        "template": "qwen_chat",
        "ps_version": "v2",
        "select_layer": -1,
        "downsample_ratio": 0.5,
        "force_image_size": 448,
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 448,
            "patch_size": 14,
            "qkv_bias": True,
            "qk_normalization": False,
            "norm_type": "layer_norm",
            "layer_norm_eps": 1e-6,
            "hidden_act": "gelu",
        },
        "llm_config": {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 8192,
        },
    }


def write_tiny_checkpoint(folder: Path, template: str = "qwen_chat", sam_sizes: dict[str, Any] = TINY_SAM) -> Path:
    """An original-layout folder whose model answers "Sure [SEG]." to whatever it is asked."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    original = tiny_config(len(tokenizer)) | {"template": template}
    model = Sa2VAForConditionalGeneration(config_from_original(original, sam_sizes, "config.json"))
    randomise(model)
    teach_answer(model, tokenizer)
    tokenizer.save_pretrained(folder)
    return write_official(folder, model, original, sam_sizes)


def write_official(folder: Path, model: Any, original: dict[str, Any], sam_sizes: dict[str, Any] = TINY_SAM) -> Path:
    """The configuration and the weights of a model in the official layout."""
    (folder / "config.json").write_text(json.dumps(original))
    (folder / f"sam{3 if sam_sizes is TINY_SAM3 else 2}_sizes.json").write_text(json.dumps(sam_sizes))
    state = {key: tensor.clone() for key, tensor in to_original(model.state_dict(), model.config).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Weights from NumPy's generator, which gives the same numbers on every platform."""
    rng = np.random.Generator(np.random.PCG64(7))
    for name, tensor in sorted(model.state_dict().items()):
        values = torch.from_numpy(rng.standard_normal(tuple(tensor.shape), dtype=np.float32))
        norm = "norm" in name and name.endswith("weight")
        scale = 1 / np.sqrt(np.prod(tensor.shape[1:])) if tensor.ndim > 1 else 0.1
        tensor.copy_(1 + 0.1 * values if norm else values * (1.0 if "embed" in name else scale))
    shared = model.grounding_encoder.shared_image_embedding.positional_embedding
    model.grounding_encoder.prompt_encoder.shared_embedding.positional_embedding.copy_(shared)


@torch.no_grad()
def teach_answer(model: Any, tokenizer: Qwen2Tokenizer) -> None:
    """Make each token of ANSWER predict the next; attention stays on, so the [SEG] state still sees image and words."""
    ids = [tokenizer(token, add_special_tokens=False)["input_ids"][0] for token in ANSWER]
    embeds = model.get_input_embeddings().weight
    directions = torch.linalg.qr(embeds[ids].T).Q.T  # orthogonal, so that no token is taken for another
    embeds[ids] = 8 * directions
    for direction, following in zip(directions, ids[1:], strict=False):
        model.lm_head.weight[following] += 20 * direction
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight.mul_(
            1.5
        )  # enough that the words change the mask, too little to change the answer
        layer.mlp.down_proj.weight.mul_(0.3)
    model.text_hidden_fcs[2].weight.mul_(18)


LONGEST_FIRST = (  # otherwise one process works on them alone at the end
    "tests/grpo/test_distributed.py",
    "tests/test_end_to_end.py",
    "tests/test_run_rl_train.py",
    "tests/grpo/test_trainer.py",
    "tests/grpo/test_stage.py",
    "tests/tools/test_training.py",
    "tests/ppo/test_prompts.py",
    "tests/test_faults.py",
    "tests/reward_training/test_train.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with the longest files."""
    order = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(str(item.path.relative_to(config.rootpath)), len(order)))
    gc.freeze()  # modules stay; without them `Trainer.train` collects its memory 30 times faster


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny_sa2va"))


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint: Path) -> Sa2VAForConditionalGeneration:
    """Shared: tests must not change its weights."""
    return Sa2VAForConditionalGeneration.from_pretrained(tiny_checkpoint)


@pytest.fixture(scope="session")
def tiny_video_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny_video_sa2va"), sam_sizes=TINY_SAM_WITH_MEMORY)


@pytest.fixture(scope="session")
def tiny_video_model(tiny_video_checkpoint: Path) -> Sa2VAForConditionalGeneration:
    """Shared: as `tiny_model`, with a SAM 2 whose memory works."""
    return Sa2VAForConditionalGeneration.from_pretrained(tiny_video_checkpoint)


@pytest.fixture(scope="session")
def tiny_processor(tiny_checkpoint: Path) -> Sa2VAProcessor:
    """One tile per image: thirteen would make every test ten times slower."""
    return Sa2VAProcessor.from_pretrained(tiny_checkpoint, max_tiles=1)


@pytest.fixture(scope="session")
def tiling_processor(tiny_checkpoint: Path) -> Sa2VAProcessor:
    """As the reference cuts: up to twelve tiles and a thumbnail."""
    return Sa2VAProcessor.from_pretrained(tiny_checkpoint)


def write_tiny_data(folder: Path, images: int = 8, size: int = 96) -> Path:
    """A data folder in the user's format: bright curved tubes, one patient per image, the last mask as a PNG."""
    (folder / "images").mkdir(parents=True)
    (folder / "masks").mkdir()
    records: list[dict[str, Any]] = []
    for number in range(images):
        image, mask = tube_image(size, number)
        name = f"P{number:04d}({number:010d})_1_frame_000001.png"
        Image.fromarray(image).save(folder / "images" / name)
        Image.fromarray(mask.astype(np.uint8) * 255).save(folder / "masks" / f"{number}.png")
        records.append({"image": name, "text": ["blood vessel"], "mask_png": f"masks/{number}.png"})
    (folder / "annotations.json").write_text(json.dumps(records))
    return folder


FEW_STEPS = PPOSettings(total_timesteps=64)  # of `policy_run`
FEW_OPERATIONS = PPOSettings(128, n_envs=2, n_steps=8, batch_size=16, gamma=0.5, max_steps=2)  # of `post_run`
load_shared = lru_cache(maxsize=4)(load_sa2va_model)


@pytest.fixture(scope="module")
def load_once() -> Iterator[None]:
    """Load each frozen model once, for tests that do not change its weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_reward_network.inputs.segmenter.load_sa2va_model", load_shared)
        yield


@pytest.fixture(scope="session")
def tiny_inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> RunInputs:
    """Twelve images of a patient each; the output folder is that of the runs below."""
    folder = tmp_path_factory.mktemp("project")
    data = write_tiny_data(folder / "data", images=12, size=64)
    return open_inputs(RunConfig(str(tiny_checkpoint), data, folder / "outputs", gpu=-1))


def tiny_reward_plan(inputs: RunInputs, mode: str = "quick", steps: int = 2) -> RewardPlan:
    """One member of the smallest size."""
    plan = reward_plan(inputs.config, mode, steps, members=1)
    return plan._replace(network=replace(plan.network, channels=(4, 8), packing=2))


@pytest.fixture(scope="session")
def reward_run(tiny_inputs: RunInputs) -> Run:
    """A finished step 1, to be read only."""
    run = Run(tiny_inputs.config.output_dir / "reward_net_1", REWARD_RUN)
    run_reward_stage(tiny_inputs, tiny_reward_plan(tiny_inputs), run)
    return run


@pytest.fixture(scope="session")
def policy_run(tiny_inputs: RunInputs, reward_run: Run) -> Run:
    """A finished step 2, to be read only."""
    from rl_reward_network.ppo.prompts import policy_plan, run_policy_stage

    run = Run(tiny_inputs.config.output_dir / "sa2va_rl_finetune_1", POLICY_RUN)
    run_policy_stage(tiny_inputs, policy_plan("quick", ppo=FEW_STEPS), reward_run / BEST_REWARD_NET, run)
    return run


@pytest.fixture(scope="session")
def post_run(tiny_inputs: RunInputs) -> Run:
    """A finished experiment 2, to be read only."""
    from rl_reward_network.ppo.prompts import post_plan, run_policy_stage

    run = Run(tiny_inputs.config.output_dir / "sa2va_post_process_1", POST_RUN)
    run_policy_stage(tiny_inputs, post_plan("quick", ppo=FEW_OPERATIONS), None, run)
    return run


def write_deep_data(folder: Path, bits: int = 10, images: int = 8, size: int = 48) -> Path:
    """`write_tiny_data` as a detector of so many bits writes it, with one hot pixel in the first image."""
    for number, path in enumerate(sorted((write_tiny_data(folder, images, size) / "images").iterdir())):
        grey = np.asarray(Image.open(path).convert("L")) * np.uint16(2 ** (bits - 8))
        grey[5, 5] = 65535 if number == 0 else grey[5, 5]
        Image.fromarray(grey).save(path)
    return folder


def tube_image(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """uint8 (size, size, 3) with a bright tube on noise, and the tube's mask, bool (size, size)."""
    rng = np.random.default_rng(seed)
    rows, cols = np.mgrid[0:size, 0:size]
    centre = size / 2 + size / 4 * np.sin(rows / size * rng.uniform(3, 7) + rng.uniform(0, 6))
    mask = np.abs(cols - centre) < rng.uniform(2, 5)
    grey = 90 + 70 * mask + rng.normal(0, 8, mask.shape)
    return np.repeat(grey.clip(0, 255).astype(np.uint8)[..., None], 3, axis=2), mask


def smooth_image(height: int, width: int, seed: int = 0) -> np.ndarray:
    """uint8 (H, W, 3): a few waves, so that resizing and tiling have something to look at."""
    rng = np.random.default_rng(seed)
    rows, cols = np.mgrid[0:height, 0:width] / 40.0
    phases = rng.uniform(0, 6, (3, 3))
    channels = [np.sin(a + rows) + np.cos(b + cols) + np.sin(c + rows + cols) for a, b, c in phases]
    return (np.stack(channels, axis=-1) * 40 + 128).clip(0, 255).astype(np.uint8)


def tube_series(rng: np.random.Generator, look: str, frames: int) -> list[Angiogram]:
    """In place of `render_series`: tubes whose look cannot be recognised."""
    pairs = [tube_image(64, int(rng.integers(2**31))) for _ in range(frames)]
    return [Angiogram(image[..., 0], np.where(mask, TREE, 0), look) for image, mask in pairs]


REFUSE = """
import os, socket

def refused(*arguments, **_):
    with open(os.environ["CALLS"], "a") as file:
        file.write(f"{arguments!r}\\n")
    raise OSError("no network in this test")

class Refusing(socket.socket):
    def connect(self, address):
        return super().connect(address) if self.family == socket.AF_UNIX else refused(address)

    connect_ex = connect

socket.socket, socket.getaddrinfo, socket.create_connection = Refusing, refused, refused
"""


def refusing(folder: Path) -> dict[str, str]:
    """Environment in which every Python process refuses network calls and writes them to the file `calls`."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(REFUSE)
    return {"PYTHONPATH": str(folder / "site"), "CALLS": str(folder / "calls"), "HF_HUB_OFFLINE": "0"}


def shell(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in this very virtual environment, without the network."""
    own = {
        **os.environ,
        "VIRTUAL_ENV": sys.prefix,
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
    }
    return subprocess.run(command, cwd=folder, env=own | environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="session")
def installed() -> None:
    """The shell files install what is not there; here nothing is due."""
    own = Path(sys.prefix) == ROOT / ".venv"
    if not (is_installed(Path(sys.prefix), "{}.{}".format(*sys.version_info)) if own else not lacking()):
        pytest.skip("this environment lacks packages: the shell files would make another")


def is_installed(environment: Path, version: str) -> bool:
    """Whether the shell files would install nothing into an environment of that Python."""
    stamp = environment / STAMP
    return stamp.exists() and stamp_line(version) in stamp.read_text().splitlines()


def stamp_line(version: str) -> str:
    """What `install_packages` of scripts/common.sh leaves in an environment of that Python, without extras."""
    script = 'echo "$(cat "$1/requirements.txt" "$1/pyproject.toml" | cksum) $2 $1 "'
    command = ["bash", "-c", script, "bash", str(ROOT), version]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.rstrip("\n")
