"""README and docs agree with the code: commands, flags, links, pictures, snippets and error messages exist."""

import ast
import contextlib
import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro
from PIL import Image

from rl_reward_network import __version__
from rl_reward_network.cli.main import COMMANDS, SUBCOMMANDS, main
from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.names import read_classes
from rl_reward_network.data.readers import read_region_data
from rl_reward_network.models import sa2va
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED
from tests.conftest import smooth_image, tube_image, write_tiny_data

ROOT = Path(__file__).resolve().parents[1]
MADE = ("docs/reference/settings.md", "docs/reference/errors.md")  # from the source, when the site is built
STUBS = ("docs/changelog.md", "docs/contributing.md")  # they include the files at the root
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")]
NAMES = {path.relative_to(ROOT).as_posix(): path for path in sorted(WRITTEN)}
PAGES = {name: path.read_text() for name, path in NAMES.items() if name not in (*MADE, *STUBS)}
SHIPPED = {name: (ROOT / "rl_reward_network/assets" / name).read_text() for name in ("llms.txt", "SKILL.md")}
EVERYTHING = "\n".join([*PAGES.values(), *SHIPPED.values()])
PRESENT = "\n".join(text for name, text in PAGES.items() if name != "docs/log.md")  # the log names what was there
SHELL_FILES = {
    "run_step2_finetune.sh": "prompts",
    "run_experiment1.sh": "prompts",
    "run_experiment3.sh": "reward",
    "run_rl_train.sh": "grpo",
}


def blocks(language: str, text: str = EVERYTHING) -> list[str]:
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def command_lines() -> list[list[str]]:
    """Commands of the bash blocks as words, without comments and environment variables."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [[word for word in line if not re.match(r"[A-Z_]+=", word)] for line in words]


def lines_of(*start: str) -> list[list[str]]:
    return [line[len(start) :] for line in command_lines() if line[: len(start)] == [*start]]


def flags(line: list[str]) -> list[str]:
    names = [word.split("=")[0] for word in line if word.startswith("--")]  # also of `--flag=value`
    return [name for name in names if name not in ("--help", "--help-all")]


# ---- form ------------------------------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 90


@pytest.mark.parametrize("page", PAGES)
def test_lines_have_at_most_110_characters(page: str) -> None:
    """A row of a table is one line, so that it may be longer, but for the README."""
    lines = [line for line in PAGES[page].splitlines() if page == "README.md" or not line.startswith("|")]
    assert [line for line in lines if len(line) > 110] == []


@pytest.mark.parametrize("page", sorted(set(PAGES) - {"README.md"}))
def test_every_page_says_what_it_is_for(page: str) -> None:
    title, empty, first = PAGES[page].splitlines()[:3]
    assert title.startswith("# ")
    assert not empty
    assert first.startswith("This page ")


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = {line for block in blocks("{toctree}", PAGES["docs/index.md"]) for line in block.splitlines()}
    pages = {name.removeprefix("docs/").removesuffix(".md") for name in PAGES if name.startswith("docs/")}
    assert pages - {"index"} <= listed


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", PAGES[page], flags=re.DOTALL)
    for target in re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', prose):
        link = "".join(target)
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if file.parent == ROOT / "docs/tutorials":  # made of the notebooks when the site is built
            file = ROOT / "tutorials" / f"{file.stem}.py"
        if file.parent == ROOT / "docs/reference/api":  # made of the source, a page for each folder
            file = ROOT / "rl_reward_network" / file.stem / "__init__.py"
        assert file.exists(), link
        assert not anchor or anchor in anchors(file.read_text()), link


def anchors(text: str) -> set[str]:
    """Names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_test_file_that_a_page_names_exists() -> None:
    for name in re.findall(r"tests/[\w/]+\.py", PRESENT):
        assert (ROOT / name).exists(), name


def test_no_machine_path_is_written_anywhere() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for name in filter(lambda name: (ROOT / name).exists(), listed):
        text = (ROOT / name).read_text(errors="ignore")
        assert not re.search(r"(?<![\w.])/(?:work|home|root|Users)/", text), name


def test_readme_package_and_changelog_name_one_version() -> None:
    """The status in the README says major and minor; pages name no newer version than the package's."""
    minor = __version__.rpartition(".")[0]
    assert re.findall(r"\*\*Status: version ([\d.]+\d)", PAGES["README.md"]) == [minor]
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[?v?(\d+\.\d+)", changes, flags=re.MULTILINE)[:1] == [minor]
    named = re.findall(r"[Vv]ersion (\d+)\.(\d+)", EVERYTHING)
    assert max((int(major), int(minor)) for major, minor in named) <= tuple(map(int, minor.split(".")))


# ---- commands --------------------------------------------------------------------------------------------------------


def test_every_command_of_sa2va_rl_that_a_page_names_exists_and_every_one_is_named() -> None:
    named = set(re.findall(r"(?:^|`)sa2va-rl ([a-z][\w-]*)", EVERYTHING, flags=re.MULTILINE))
    assert named - {"nano", "adapt"} == set(COMMANDS), "the log of experiments names former commands"


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_for_programs_is_short_and_names_what_exists(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SHIPPED[name]
    assert len(text.splitlines()) <= 60
    assert all(len(line) <= 120 for line in text.splitlines())
    pages = re.findall(r"\]\(([^)]+)\.html\)", text)
    assert len(pages) > 15 or name == "SKILL.md"
    made = [page.removeprefix("docs/").removesuffix(".md") for page in MADE] + ["reference/api/index"]
    assert [page for page in pages if f"docs/{page}.md" not in NAMES and page not in made] == []
    helped = "".join(help_of(command, capsys) for command in COMMANDS).replace("-", "_")
    assert [flag for flag in re.findall(r"--[a-z][\w-]*[a-z]", text) if flag.replace("-", "_") not in helped] == []


@pytest.mark.parametrize("name", [*COMMANDS, *SUBCOMMANDS])
def test_every_flag_of_a_command_is_in_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in lines_of("sa2va-rl", *name.split()) if f"{name} {line[:1]}" not in further_words()]
    lines += [line[1:] for file, command in SHELL_FILES.items() if command == name for line in lines_of("bash", file)]
    lines += [line for line in torchrun_lines() if line[0] == name]
    used = {f"--{flag[2:].replace('-', '_')}" for line in lines for flag in flags(line)}
    if used:
        text = help_of(name, capsys)
        assert [flag for flag in used if flag not in text] == []


def further_words() -> set[str]:
    """Commands of two words, as "data ['import']": their lines are not of the command of one word."""
    return {f"{first} {[second]}" for first, second in map(str.split, SUBCOMMANDS)}


def torchrun_lines() -> list[list[str]]:
    return [line[line.index("-m") + 2 :] for line in lines_of("torchrun") if "rl_reward_network.cli" in line]


def help_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Every flag of a command; in this process, which has imported it already."""
    text = ""
    for word in ("--help", "--help-all"):
        if word == "--help" or word in text:
            with contextlib.suppress(SystemExit):
                main([*name.split(), word])
            text += capsys.readouterr().out
    return text


INLINE = re.findall(r"`python\s-m\s((?:benchmarks|tools|examples)\.\w[^`]*)`", PRESENT)
USED: dict[tuple[str, ...], list[str]] = {}  # module and subcommand -> flags
for words in [*lines_of("python", "-m"), *map(str.split, INLINE)]:
    if words[0] not in ("pytest", "sphinx"):
        USED.setdefault(tuple(words[: 2 if words[0] == "benchmarks.speed" else 1]), []).extend(flags(words))


@pytest.mark.parametrize("command", sorted(USED), ids=" ".join)
def test_every_flag_of_a_benchmark_is_in_its_help(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    module, *subcommand = command
    used = USED[command]
    module += ".__main__" * (ROOT / module.replace(".", "/")).is_dir()
    with pytest.raises(SystemExit) as ended:
        tyro.cli(importlib.import_module(module).Args, args=[*subcommand, "--help"])  # 5 seconds each as a process
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert [flag for flag in used if flag.replace("_", "-") not in text] == []


@pytest.mark.parametrize("file", sorted({line[0] for line in lines_of("bash")}))
def test_every_shell_file_exists_and_knows_its_mode(file: str) -> None:
    path = ROOT / file
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    modes = {line[1] for line in lines_of("bash") if line[0] == file and line[1:]} - {"MODEL"}  # of run_real.sh
    assert modes <= {"quick", "full", "--help"}
    if modes:
        wrong = subprocess.run(["bash", str(path), "neither"], capture_output=True, text=True)
        assert wrong.returncode == 2
        assert "quick|full" in wrong.stderr


# ---- snippets --------------------------------------------------------------------------------------------------------

SNIPPETS = [(page, number) for page in PAGES for number in range(len(blocks("python", PAGES[page])))]


@pytest.fixture
def names(tiny_video_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a reader has before a snippet: an image, masks, scores, and the files that it names."""
    network = RewardNetwork(RewardNetworkConfig(channels=(8,), packing=2), {"train_groups": [], "val_groups": []})
    network.save_pretrained(tmp_path / "outputs/RUN/best_reward_net")
    write_tiny_data(tmp_path / "DATA", images=12, size=64)
    (tmp_path / "MODEL").symlink_to(tiny_video_checkpoint)
    (tmp_path / "sa2va-4b-ours").symlink_to(EMBEDDED[DEFAULT_MODEL])
    load = sa2va.load_sa2va_model
    monkeypatch.setattr(sa2va, "load_sa2va_model", lambda path, device: load(tiny_video_checkpoint))
    monkeypatch.chdir(tmp_path)
    image, mask = smooth_image(60, 60), np.ones((60, 60), dtype=bool)
    Image.fromarray(image).save("scan_001.png")
    masks, candidates = np.ones((3, 60, 60), dtype=np.float32), [np.stack([mask, ~mask])]
    scores = np.array([[0.25, 0.75]])
    return {
        "image": image,
        "images": [image],
        "frames": [np.roll(image, shift, axis=1) for shift in range(7)],
        "mask": mask,
        "masks": masks,
        "candidates": candidates,
        "scores": scores,
    }


@pytest.mark.parametrize(("page", "number"), SNIPPETS)
def test_every_python_snippet_runs(page: str, number: int, names: dict[str, Any]) -> None:
    exec(blocks("python", PAGES[page])[number], names)
    if "network" in names:
        assert names["scores"].shape == (3,)
        assert names["foreground"].shape == (60, 60)
    if "shown" in names:
        assert names["result"]["prediction_masks"][0].shape == (7, 60, 60)
    if "answer" in names and "region1" not in names.get("question", ""):
        assert names["answer"]["prediction_masks"][0].shape == (1, 60, 60)
    if "env" in names:
        assert names["terminated"]
        assert names["reward"] in names["scores"]
    if "rows" in names:
        (region,) = read_region_data("my_regions")[0]
        assert region.caption == "the long vessel on the left"
        assert region.group_id != region.image_id, "the patient is not the group"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks("json", PAGES[page])])
def test_the_example_annotations_are_read(page: str, tmp_path: Path) -> None:
    example, *classes = blocks("json", PAGES[page])
    for content in classes:
        (tmp_path / "classes.json").write_text(content)
        assert [one.name for one in read_classes(tmp_path / "classes.json")] == ["right artery", "left artery"]
    records = json.loads(example)
    (tmp_path / "annotations.json").write_text(example)
    for record in records:
        image, mask = tube_image(100, 0)
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.fromarray(image).save(tmp_path / "images" / record["image"])
        if "mask_png" in record:
            (tmp_path / "masks").mkdir(exist_ok=True)
            Image.fromarray(mask).save(tmp_path / record["mask_png"])
    samples = read_annotations(tmp_path)
    assert [sample.labelled for sample in samples] == ["mask" in record or "mask_png" in record for record in records]
    assert len({sample.group_id for sample in samples}) == 2
    for sample in filter(lambda sample: sample.labelled, samples):
        mask = sample.load_mask()
        assert mask is not None
        assert mask.any()


# ---- messages --------------------------------------------------------------------------------------------------------


def source_texts() -> list[str]:
    """Every string of the package, where values inside f-strings become `...`, and the shell files."""
    nodes = [n for path in ROOT.glob("rl_reward_network/**/*.py") for n in ast.walk(ast.parse(path.read_text()))]
    joined = [
        "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]
    joined += [path.read_text() for path in (*ROOT.glob("*.sh"), *ROOT.glob("scripts/*.sh"))]
    return joined + [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_every_message_of_the_troubleshooting_page_is_in_the_source() -> None:
    texts = source_texts()
    page = PAGES["docs/how-to/troubleshooting.md"].replace("\n  ", " ")
    quoted = re.findall(r"^- (?:[A-Z][^`:]*)?`([^`]+)`(?:,|:| in| near| with)", page, flags=re.MULTILINE)
    assert len(quoted) > 15
    for message in quoted:
        for piece in filter(lambda piece: len(piece) > 3, message.split("...")):
            assert any(piece.strip() in text for text in texts), message
