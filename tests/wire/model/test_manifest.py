import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwire import limits
from meshwire.model.manifest import DTYPES, ModelManifest, TensorSpec, first_difference


def tensor(name: str = "w", shape: tuple[int, ...] = (3, 4), dtype: str = "float32", **other: Any) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, **{"kind": "parameter", **other})


def manifest(*tensors: TensorSpec, optimizer: str = "SGD") -> ModelManifest:
    return ModelManifest(tensors=tensors, optimizer=optimizer)


def test_what_travels_where() -> None:
    """O5: float buffers travel in the vector, integer buffers in the seal; frozen tensors in neither."""
    counter = tensor("n", (2,), "int64", kind="buffer")
    model = manifest(
        tensor("w"), tensor("mean", kind="buffer"), counter, tensor("f", kind="frozen"), tensor("empty", (0, 5))
    )
    assert [spec.name for spec in model.tensors if spec.in_vector] == ["w", "mean"]
    assert [spec.name for spec in model.tensors if spec.in_seal] == ["n"]
    assert model.integer_values == 2


def test_a_scalar_holds_one_value() -> None:
    assert tensor(shape=()).count == 1


def test_a_manifest_survives_the_wire() -> None:
    model = manifest(tensor("a", aliases=("b", "c")), tensor("n", (), "int64", kind="buffer"))
    assert ModelManifest.load(model.model_dump(mode="python")) == model
    assert ModelManifest.load(model.model_dump()).digest() == model.digest()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "cannot be printed"),
        ({"name": "x" * (limits.TENSOR_NAME_CHARS_MAX + 1)}, "name"),
        ({"shape": (1,) * (limits.TENSOR_DIMS_MAX + 1)}, "shape"),
        ({"shape": (-1,)}, "shape"),
        ({"shape": (2**20, 2**20)}, "exceed the limit"),
        ({"dtype": "object"}, "unknown dtype"),
        ({"dtype": "complex64"}, "requires_grad"),
        ({"dtype": "int64"}, "requires_grad"),
        ({"dtype": "bool", "kind": "buffer"}, "frozen"),
        ({"kind": "other"}, "kind"),
        ({"aliases": ("a",) * (limits.TENSOR_ALIASES_MAX + 1)}, "aliases"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_bad_tensor_is_refused(fields: dict[str, Any], says: str) -> None:
    good = {"name": "w", "shape": (1,), "dtype": "float32", "kind": "parameter"}
    with pytest.raises(ValidationError, match=says):
        TensorSpec.load(good | fields)


def test_a_bad_manifest_is_refused() -> None:
    with pytest.raises(ValidationError, match="two tensors are named w"):
        manifest(tensor("w"), tensor("w"))
    with pytest.raises(ValidationError, match="two tensors are named v"):
        manifest(tensor("v"), tensor("w", aliases=("v",)))
    with pytest.raises(ValidationError, match="no trainable parameter"):
        manifest(tensor("w", kind="frozen"), tensor("e", (0,)))
    with pytest.raises(ValidationError, match="exceeds the limit"):
        manifest(tensor("v", (limits.VALUES_MAX,)), tensor("w"))
    with pytest.raises(ValidationError, match="the largest is table with 20000"):
        manifest(
            tensor("w"), tensor("table", (20_000,), "int64", kind="buffer"), tensor("n", (), "int64", kind="buffer")
        )


def test_the_first_difference_is_named() -> None:
    ours = manifest(tensor("a"), tensor("b"), tensor("n", (), kind="buffer"))
    cases = [
        (manifest(tensor("a"), tensor("c")), "tensor 1 is parameter b here and parameter c there"),
        (
            manifest(tensor("a"), tensor("b", (4, 3)), tensor("n", (9,), kind="buffer")),
            "parameter b has shape (3, 4) here and (4, 3) there",
        ),
        (manifest(tensor("a", dtype="float16")), "parameter a has dtype float32 here and float16 there"),
        (manifest(tensor("a", aliases=("z",))), "parameter a has aliases () here and ('z',) there"),
        (manifest(tensor("a"), tensor("b", kind="frozen")), "parameter b has kind parameter here and frozen there"),
        (manifest(tensor("a"), tensor("b")), "buffer n exists here and not there"),
        (manifest(*ours.tensors, tensor("d")), "parameter d exists there and not here"),
        (manifest(*ours.tensors, optimizer="Adam"), "the optimizer is SGD here and Adam there"),
    ]
    for theirs, sentence in cases:
        assert first_difference(ours, theirs) == sentence
    assert first_difference(ours, manifest(*ours.tensors)) is None


SPECS = st.builds(
    TensorSpec,
    name=st.sampled_from("abcd"),
    shape=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    dtype=st.sampled_from(["float32", "float16"]),
    kind=st.sampled_from(["parameter", "frozen", "buffer"]),
)
MANIFESTS = st.builds(
    lambda specs: manifest(tensor("first"), *specs), st.lists(SPECS, max_size=4, unique_by=lambda spec: spec.name)
)


@settings(max_examples=100)
@given(MANIFESTS, MANIFESTS)
def test_manifests_differ_exactly_when_their_digests_do(a: ModelManifest, b: ModelManifest) -> None:
    assert (first_difference(a, b) is None) == (a.digest() == b.digest())


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=100)
@given(
    st.fixed_dictionaries(
        {"name": JUNK | st.just("w"), "shape": JUNK | st.lists(st.integers(), max_size=20)},
        optional={"dtype": JUNK | st.sampled_from(sorted(DTYPES)), "kind": JUNK | st.just("parameter")},
    )
)
def test_what_a_peer_sends_is_valid_or_refused(plain: dict[str, Any]) -> None:
    try:
        spec = TensorSpec.load(plain)
    except ValidationError:
        return
    assert 0 <= math.prod(spec.shape) <= limits.VALUES_MAX
