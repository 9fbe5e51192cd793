"""Every way to train runs on a tiny model on the CPU, and is measured."""

import pytest

from benchmarks.gpu_training import WAYS, Args, main


def test_every_way_is_a_row_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes", reason="needs pip install -e '.[quantization]'")
    main(Args(("tiny",), "cpu"))
    printed = capsys.readouterr().out
    for way in WAYS:
        (line,) = (line for line in printed.splitlines() if line.startswith(f"tiny, {way}: "))
        seconds, rollouts, peak, _ = map(float, line.removeprefix(f"tiny, {way}: ").split(";")[0].split(","))
        assert 0 < rollouts < seconds
        assert peak > 0


def test_a_way_that_fails_is_a_row_and_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.gpu_training.prepare_model", lambda *_: 1 / 0)
    with pytest.raises(SystemExit) as error:
        main(Args(("tiny",), "cpu", ("supervised",)))
    assert error.value.code == 1
    assert "failed, see above" in capsys.readouterr().out
