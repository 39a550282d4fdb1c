"""A taskset of verifiers that two agents play: one too many to train."""

import verifiers.v1 as vf


class Pairs(vf.Taskset[vf.Task[vf.TaskData, vf.State]]):
    def load(self) -> list[vf.Task]:
        return [vf.Task(vf.TaskData(prompt="debate"))]


class PairConfig(vf.EnvConfig):
    left: vf.AgentConfig = vf.AgentConfig()
    right: vf.AgentConfig = vf.AgentConfig()


class Pair(vf.Env[PairConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.left.run(task)


__all__ = ["Pair", "Pairs"]
