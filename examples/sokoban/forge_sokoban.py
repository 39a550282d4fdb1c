"""Sokoban as a taskset of verifiers: the engine plays the user, and a turn is one move."""

import verifiers.v1 as vf
from boards import draw_board  # type: ignore[import-not-found]  # beside this file


class SokobanTaskConfig(vf.TaskConfig):
    most: int = 5  # moves of an episode


class SokobanConfig(vf.TasksetConfig):
    task: SokobanTaskConfig = SokobanTaskConfig()
    boards: int = 1000
    size: int = 3


class SokobanData(vf.TaskData):
    seed: int
    size: int


class SokobanTask(vf.Task[SokobanData, vf.State, SokobanTaskConfig]):
    pass


class SokobanBoards(vf.Taskset[SokobanTask, SokobanConfig]):
    def load(self) -> list[SokobanTask]:
        size = self.config.size
        return [
            SokobanTask(
                SokobanData(prompt=draw_board(seed, size).text, seed=seed, size=size),
                self.config.task,
            )
            for seed in range(self.config.boards)
        ]


class SokobanEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class SokobanEnv(vf.Env[SokobanEnvConfig]):
    async def run(self, task: SokobanTask, agents: vf.Agents) -> None:
        board = draw_board(task.data.seed, task.data.size)
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            for moves_left in range(task.config.most - 1, -1, -1):
                if segment.terminated:
                    break
                board = board.moved(segment.last_reply.strip())
                if board.solved or not moves_left:
                    break
                segment = await talk.turn(board.text)
        talk.trace.record_reward("solved", float(board.solved), 1.0)


__all__ = ["SokobanBoards", "SokobanEnv"]
