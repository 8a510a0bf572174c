"""What the store refuses.

StoreError
├── NotFound      nothing of that name or id
├── Taken         the name is another's already
├── WrongState    not in this state of the submission or board
├── LimitReached  the owner has had as many scored submissions as the board allows in a season, or refused in a day
├── NoRoom        the board's disk has none for what is announced
└── LeaseLost     another worker, or nobody, plays this submission now
"""


class StoreError(Exception):
    """The database cannot be used, or not for this. The message says why and what to do."""


class NotFound(StoreError): ...


class Taken(StoreError): ...


class WrongState(StoreError): ...


class LimitReached(StoreError): ...


class NoRoom(StoreError): ...


class LeaseLost(StoreError): ...
