"""Stand-ins for clouds on this machine, to rehearse launches and to test launchers."""

from . import _start  # noqa: F401

# isort: split
from .__about__ import __version__
from ._aws._scripted import ScriptedTrainingJob, TrainingWorld
from ._aws._stand_ins import SageMakerProcesses, SageMakerStandIn
from ._aws._training._region import TrainingHabits
from ._kubernetes._api._access import Access
from ._kubernetes._control._images import Images
from ._kubernetes._control._nodes import Node, Nodes
from ._kubernetes._processes._pod import LocalPod, LocalPods
from ._kubernetes._scripted._world import ScriptedPod, World
from ._kubernetes._stand_ins import KubernetesProcesses, KubernetesStandIn
from ._modal._hands import ScriptedDict
from ._modal._processes import LocalCall, LocalCalls
from ._modal._scripted import ModalWorld, ScriptedCall
from ._modal._stand_ins import ModalProcesses, ModalStandIn
from ._modal._workspace._habits import ModalHabits
from ._server._errors import StandInError
from ._server._faults import Call, Calls, Faults

__all__ = [
    "Access",
    "Call",
    "Calls",
    "Faults",
    "Images",
    "KubernetesProcesses",
    "KubernetesStandIn",
    "LocalCall",
    "LocalCalls",
    "LocalPod",
    "LocalPods",
    "ModalHabits",
    "ModalProcesses",
    "ModalStandIn",
    "ModalWorld",
    "Node",
    "Nodes",
    "SageMakerProcesses",
    "SageMakerStandIn",
    "ScriptedCall",
    "ScriptedDict",
    "ScriptedPod",
    "ScriptedTrainingJob",
    "StandInError",
    "TrainingHabits",
    "TrainingWorld",
    "World",
    "__version__",
]
