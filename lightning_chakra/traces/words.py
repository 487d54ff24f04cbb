"""What the names and categories in a trace mean: operators, kernels, copies, communication, steps. Pure."""

import re

STEP_MARK = re.compile(r"ProfilerStep\s*#\s*(\d+)")
"""The mark of a step, from the start of its first batch to the end of its last."""

VALIDATION = "validation"
"""The range in which a validation run lies."""

OPERATORS = ("cpu_op", "user_annotation")
"""The categories of events that have a node in the execution trace."""

RUNTIME = ("cuda_runtime", "cuda_driver", "privateuse1_runtime", "privateuse1_driver", "xpu_runtime")
"""The categories of calls into a device's driver."""

DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
"""The categories of what a device did."""

COMMUNICATION = re.compile(r"nccl.*Kernel", re.S)
"""Kernels that communicate, as HolisticTraceAnalysis tells them (NCCL's and RCCL's)."""

COPY = re.compile(r"Memcpy|Memset|dma")
"""Copies, as HolisticTraceAnalysis tells them; those with the category of a copy are, too."""

CPU_BACKEND_RANGE = re.compile(r"(gloo|mpi|ucc):(\w+)")
"""The ranges in which a CPU backend works on a collective; it leaves no ``record_param_comms``."""

BACKEND_RANGE = re.compile(r"(gloo|nccl|ucc|mpi|xccl|hccl):")
"""Ranges that a backend opens and closes in different threads (``gloo:all_reduce``): no node, and no id."""

KERNEL_COLLECTIVE = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+)")
"""The collective in the name of a kernel."""

SYNCHRONIZING = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier", re.I)
"""Collectives in which every member waits for all others; a broadcast or a send ends on the sender before the others
have it."""

DEVICE_COLLECTIVE = re.compile(r"^(nccl|rccl|xccl|hccl|mscclpp?)", re.I)
"""Kernels whose ends the ranks share, for aligning clocks."""
