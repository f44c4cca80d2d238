"""Environments, which respond to the model between its turns."""

from rlzoo.environments.environment import Environment, Message, Messages, Move, Observation
from rlzoo.environments.host import Host

__all__ = ["Environment", "Host", "Message", "Messages", "Move", "Observation"]
