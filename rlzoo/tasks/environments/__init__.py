"""Environments, which respond to the model between its turns."""

from rlzoo.tasks.environments.environment import Environment, Message, Messages, Observation
from rlzoo.tasks.environments.host import Host

__all__ = ["Environment", "Host", "Message", "Messages", "Observation"]
