"""Capacity planned with numbers: the real scheduler and block manager against a model of time.

    from paged_jax.simulate import ChatTraffic, ConstantStepTime, simulate

    results = simulate(ChatTraffic(num_requests=3000), config, ConstantStepTime(0.025))
    print(results.figures())

Host code only: nothing here imports jax.
"""

from paged_jax.simulate.allocators import ALLOCATORS
from paged_jax.simulate.device_model import (
    ACCELERATORS,
    MODELS,
    Accelerator,
    DeviceModel,
    ModelShape,
    StepWork,
)
from paged_jax.simulate.loop import simulate
from paged_jax.simulate.replica import Replica
from paged_jax.simulate.results import Results
from paged_jax.simulate.step_time import ConstantStepTime, FittedStepTime, StepTime
from paged_jax.simulate.traces import read_azure, read_mooncake, read_prompts, scaled
from paged_jax.simulate.traffic import ChatTraffic, TraceRequest

__all__ = [
    "ACCELERATORS",
    "ALLOCATORS",
    "Accelerator",
    "ChatTraffic",
    "ConstantStepTime",
    "DeviceModel",
    "FittedStepTime",
    "MODELS",
    "ModelShape",
    "Replica",
    "Results",
    "StepTime",
    "StepWork",
    "TraceRequest",
    "read_azure",
    "read_mooncake",
    "read_prompts",
    "scaled",
    "simulate",
]
