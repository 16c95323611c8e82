"""Which of the grammars' messages an engine has been sent, so that each of several hears everything once."""

from __future__ import annotations

from ...engine.link.messages import AddGrammar, DropGrammars, SetVocabulary, ToEngine


class GrammarNews:
    """Of one engine. What it was told before it died, its successor does not know: another epoch."""

    def __init__(self) -> None:
        self._epoch = -1
        self._vocabulary = False
        self._keys: set[str] = set()

    def knows(self, epoch: int, key: str) -> bool:
        return self._epoch == epoch and key in self._keys

    def note(self, epoch: int, message: ToEngine) -> bool:
        """Whether the engine has to be sent this; from now on it counts as sent."""
        if self._epoch != epoch:
            self._epoch, self._vocabulary = epoch, False
            self._keys.clear()
        known = False
        if isinstance(message, SetVocabulary):
            known, self._vocabulary = self._vocabulary, True
        elif isinstance(message, AddGrammar):
            known = message.key in self._keys
            self._keys.add(message.key)
        elif isinstance(message, DropGrammars):
            known = self._keys.isdisjoint(message.keys)
            self._keys.difference_update(message.keys)
        return not known
