"""ROLL's import path of the actor for other policy losses. Here every actor reads `pg_variant`, so it is the same."""

from roll.pipeline.rlvr.actor_worker import ActorWorker


class ActorPGWorker(ActorWorker):
    """The policy loss that `actor_train.pg_variant` names: vanilla, ppo, tis, topr, cispo or kimi15."""
