"""The plan of a GRPO run: what of it is written into config.json."""

from dataclasses import asdict
from pathlib import Path

from rl_reward_network.artefacts import read_json
from rl_reward_network.grpo.settings import GRPOPlan

OLD_RUN = Path(__file__).parents[1] / "fixtures" / "run_0_6" / "runs" / "sa2va_grpo_finished"


def test_a_plan_has_the_names_of_old_runs() -> None:
    plan, origin = asdict(GRPOPlan("quick")), read_json(OLD_RUN / "config.json")["origin"]
    later = [plan.pop(name) for name in ("mask_rewards", "max_labelled", "freeze_embeddings")]
    assert later == [None, None, None], "later fields, which compare as equal with their absence"
    assert plan.keys() <= origin.keys()
    assert plan["weights"] == origin["weights"]
