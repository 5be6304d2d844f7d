"""ROLL's import path of the actor for other policy losses. Here every actor reads `pg_variant`, so it is the same."""

from roll.pipeline.agentic.agentic_actor_worker import ActorWorker

__all__ = ["ActorWorker"]
