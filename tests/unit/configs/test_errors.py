from __future__ import annotations

from configs import errors


def walk(cls: type[errors.ServingError]) -> list[type[errors.ServingError]]:
    return [cls, *(grandchild for child in cls.__subclasses__() for grandchild in walk(child))]


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [cls.code for cls in walk(errors.ServingError)]
    assert len(set(codes)) == len(codes)


def test_message_is_kept() -> None:
    assert str(errors.ConfigError("key: 3")) == errors.ConfigError("key: 3").message == "key: 3"
