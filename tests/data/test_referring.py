"""Sets of referring expressions, as released: sentences, splits, several objects or none, ignored pixels, a pickle."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data.masks import to_rle
from rl_reward_network.data.referring import IGNORE, read_questions
from tests.conftest import SHARED

CASE = SHARED / "cases" / "refcoco" / "input"
SQUARES = {1: [[2, 2, 12, 2, 12, 12, 2, 12]], 2: [[20, 20, 30, 20, 30, 30, 20, 30]]}


def write_images(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.fromarray(np.full((40, 60, 3), 90, np.uint8)).save(folder / name)
    return folder


def write_refcoco(folder: Path, refs: list[dict[str, Any]], name: str = "refs(unc).p") -> Path:
    write_images(folder / "images", "a.jpg")
    outlines = [{"id": number, "image_id": 7, "segmentation": outline} for number, outline in SQUARES.items()]
    content = {"images": [{"id": 7, "file_name": "a.jpg"}], "annotations": outlines}
    (folder / "instances.json").write_text(json.dumps(content))
    data = json.dumps(refs).encode() if name.endswith("json") else pickle.dumps(refs, protocol=2)
    (folder / name).write_bytes(data)
    return folder


def ref(objects: Any, *sentences: str, split: str = "val") -> dict[str, Any]:
    return {
        "image_id": 7,
        "ann_id": objects,
        "split": split,
        "sentences": [{"sent": sentence} for sentence in sentences],
    }


def test_each_sentence_of_refcoco_is_a_question_and_training_ones_are_left_out(tmp_path):
    refs = [ref(1, "left one", "the square at the top"), ref(2, "right one", split="testA"), ref(2, "x", split="train")]
    questions = read_questions(write_refcoco(tmp_path, refs))
    asked = ["left one", "the square at the top", "right one"]
    assert [question.text for question in questions] == [f"Please segment {text} in this image." for text in asked]
    image, truth = questions[0].load()
    assert image.shape == (40, 60, 3)
    assert truth[2:12, 2:12].all()
    assert truth.sum() == 100
    assert questions[2].load()[1][20:30, 20:30].all()


def test_grefcoco_has_several_objects_or_none(tmp_path):
    refs = [ref([1, 2], "both"), ref([-1], "the third one")]
    both, none = read_questions(write_refcoco(tmp_path, refs, "grefs(unc).json"))
    assert both.load()[1].sum() == 200
    assert none.load()[1].sum() == 0


def test_of_several_splits_that_of_the_papers_is_read_and_others_are_refused(tmp_path):
    folder = write_refcoco(tmp_path, [ref(1, "left one")])
    (folder / "refs(google).p").write_bytes(pickle.dumps([ref(1, "twice"), ref(2, "of train")]))
    assert [question.text for question in read_questions(folder)] == ["Please segment left one in this image."]
    (folder / "refs(unc).p").rename(folder / "refs(own).p")
    with pytest.raises(ValueError, match=r"2 files like .*expected one"):
        read_questions(folder)
    (folder / "refs(google).p").write_bytes(pickle.dumps([ref(9, "of another set")]))
    (folder / "refs(own).p").unlink()
    with pytest.raises(ValueError, match=r"object 9 is not in instances\.json"):
        read_questions(folder)


def test_images_may_lie_beside_the_folder_and_a_missing_one_is_named(tmp_path):
    folder = write_refcoco(tmp_path / "ref_seg" / "refcoco", [ref(1, "one")])
    write_images(folder / "masks", "a.jpg")
    assert read_questions(folder)[0].image == folder / "images" / "a.jpg", "not any file of that name"
    (folder / "images" / "a.jpg").rename(write_images(tmp_path / "ref_seg" / "train2014") / "a.jpg")
    assert read_questions(folder)[0].image == tmp_path / "ref_seg" / "train2014" / "a.jpg"
    (tmp_path / "ref_seg" / "train2014" / "a.jpg").unlink()
    with pytest.raises(ValueError, match=r"images.a\.jpg: no such image \(1 of 1 questions\)"):
        read_questions(folder)


def test_a_pickle_can_call_nothing(tmp_path):
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "called"),)

    folder = write_refcoco(tmp_path / "set", [])
    (folder / "refs(unc).p").write_bytes(pickle.dumps([Evil()]))
    with pytest.raises(ValueError, match=r"refs\(unc\)\.p: not a file of referring expressions \(holds posix\.mkdir"):
        read_questions(folder)
    assert not (tmp_path / "called").exists()
    (folder / "refs(unc).p").write_bytes(b"\x80")
    with pytest.raises(ValueError, match="download it again"):
        read_questions(folder)


def test_reasonseg_paints_the_largest_first_with_its_line_and_knows_ignored_pixels(tmp_path):
    write_images(tmp_path, "a.jpg", "b.jpg")
    box = lambda x, y, side: [[x, y], [x + side, y], [x + side, y + side], [x, y + side]]  # noqa: E731
    shapes = [
        {"label": "ignore", "points": box(4, 4, 3)},  # painted last, though it stands first
        {"label": "target", "points": box(2.7, 2.7, 10)},
        {"label": "flag", "points": box(30, 30, 5)},
    ]
    content = {"shapes": shapes, "text": ["What may bleed?", "unused"], "is_sentence": True}
    (tmp_path / "a.json").write_text(json.dumps(content))
    (tmp_path / "b.json").write_bytes(
        json.dumps(content | {"is_sentence": False, "text": ["café"]}, ensure_ascii=False).encode("cp1252")
    )
    sentence, phrase = read_questions(tmp_path)
    assert sentence.text == "What may bleed? Please respond with segmentation mask."
    assert phrase.text == "Please segment café in this image."
    truth = sentence.load()[1]
    assert (truth == 1).sum() == 11 * 11 - 16, "points are cut to whole numbers, and the line belongs to it"
    assert (truth == IGNORE).sum() == 16
    assert not truth[30:].any()
    (tmp_path / "a.jpg").rename(tmp_path / "a.JPG")
    assert len(read_questions(tmp_path)) == 2
    (tmp_path / "b.jpg").unlink()
    with pytest.raises(ValueError, match=r"b\.jpg: no such image"):
        read_questions(tmp_path)


def test_questions_of_ones_own_may_have_a_file_an_rle_no_object_or_a_text(tmp_path):
    mask = np.zeros((40, 60), bool)
    mask[3:9, 4:10] = True
    Image.fromarray(mask.astype(np.uint8) * 255).save(write_images(tmp_path, "a.jpg") / "m.png")
    entries = [{"image": "a.jpg", "question": "q", "mask": stored} for stored in ("m.png", to_rle(mask), None)]
    (tmp_path / "own.json").write_text(json.dumps([*entries, {"image": "a.jpg", "question": "What is this?"}]))
    file, rle, none, text = read_questions(tmp_path / "own.json")
    assert np.array_equal(file.load()[1], mask)
    assert np.array_equal(rle.load()[1], mask)
    assert none.load()[1].sum() == 0
    assert text.truth is None
    (tmp_path / "own.json").write_text(json.dumps([{"image": "a.jpg"}]))
    with pytest.raises(ValueError, match=r"own\.json: entry 0 is .*expected an object with image, question"):
        read_questions(tmp_path / "own.json")
    (tmp_path / "own.json").write_text(json.dumps([{"image": "a.jpg", "question": "q", "mask": 3}]))
    with pytest.raises(ValueError, match=r"entry 0: mask is 3, expected a file"):
        read_questions(tmp_path / "own.json")
    with pytest.raises(ValueError, match="no question; expected instances"):
        read_questions(tmp_path / "nowhere")


@pytest.mark.skipif(not CASE.exists(), reason="the cases of the field are not here")
def test_a_refcoco_that_others_could_not_use() -> None:
    questions = read_questions(CASE)
    assert len(questions) == 4, "two sentences of each of the two objects that are not of train"
    assert all(question.load()[1].any() for question in questions)
