"""Replicas train as one model would on the whole batch, and carry the caller's state into their threads."""

import copy
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sharded_loader import Replicas
from sharded_loader.parallel import replicas as module


def conv_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 3)
    ).double()


def backward(model, shard):
    x, y = shard
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.item()


@pytest.fixture(params=["one after the other", "threads"])
def lanes(request, monkeypatch):
    if request.param == "threads":
        monkeypatch.setattr(module, "_lanes", lambda devices: [[i] for i in range(len(devices))])
    return request.param


@pytest.mark.slow
def test_uneven_shards_train_as_the_whole_batch(lanes):
    single = conv_net()
    model = copy.deepcopy(single)
    replicas = Replicas(model, ["cpu", "cpu", "cpu"])  # one more than there are shards
    assert replicas.model is model
    one = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
    many = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(8, 1, 6, 6, dtype=torch.float64), torch.arange(8) % 3
    for _ in range(5):
        one.zero_grad()
        loss = backward(single, (x, y))
        one.step()
        replicas.zero_grad()
        losses = replicas.run(backward, [(x[:5], y[:5]), (x[5:], y[5:])])
        replicas.reduce_grads([5, 3])
        many.step()
        replicas.broadcast()
        assert (losses[0] * 5 + losses[1] * 3) / 8 == pytest.approx(loss, rel=1e-12)
    for replica in replicas.models:
        for ours, theirs in zip(replica.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_parameters_without_gradient_and_frozen_ones():
    model = torch.nn.ModuleDict({k: torch.nn.Linear(1, 1, bias=False) for k in ("used", "once", "never", "frozen")})
    replicas = Replicas(model, ["cpu", "cpu"])
    model["frozen"].requires_grad_(False)  # after the copies were made

    def fn(m, shard):
        names, x = shard
        sum(m[n](x) for n in names).mean().backward()

    replicas.run(fn, [(["used", "frozen"], torch.ones(1, 1)), (["used", "once", "frozen"], torch.full((3, 1), 2.0))])
    replicas.reduce_grads([1, 3])
    assert model["used"].weight.grad.item() == pytest.approx(1.75)
    assert model["once"].weight.grad.item() == pytest.approx(1.5)
    assert model["never"].weight.grad is None and model["frozen"].weight.grad is None
    assert all(p.grad is None for p in replicas.models[1].parameters())


def test_sparse_gradients_are_reduced():
    model = torch.nn.Embedding(4, 1, sparse=True)
    replicas = Replicas(model, ["cpu", "cpu"])
    replicas.run(lambda m, x: m(x).mean().backward(), [torch.tensor([0]), torch.tensor([1, 1, 1])])
    replicas.reduce_grads([1, 3])
    assert model.weight.grad.to_dense().flatten().tolist() == [0.25, 0.75, 0, 0]


@pytest.mark.parametrize("sparse", [0, 1])
def test_a_sparse_and_a_dense_gradient_are_reduced(sparse):
    model = torch.nn.Embedding(4, 1)
    replicas = Replicas(model, ["cpu", "cpu"])
    replicas.models[sparse].sparse = True
    replicas.run(lambda m, x: m(x).mean().backward(), [torch.tensor([0]), torch.tensor([1, 1, 1])])
    replicas.reduce_grads([1, 3])
    assert model.weight.grad.to_dense().flatten().tolist() == [0.25, 0.75, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_summed_without_rounding_in_between(dtype):
    model = torch.nn.Linear(1, 1, bias=False).to(dtype)
    replicas = Replicas(model, ["cpu"] * 8)
    # 1 + 7 * 2**-9: each step would round back to 1.
    replicas.run(
        lambda m, x: m(x).sum().backward(),
        [torch.tensor([[8.0]], dtype=dtype)] + [torch.tensor([[8 * 2.0**-9]], dtype=dtype) for _ in range(7)],
    )
    replicas.reduce_grads([1] * 8)
    assert model.weight.grad.dtype == dtype
    assert model.weight.grad.item() == torch.tensor(1 + 7 * 2.0**-9).to(dtype).item() > 1


def test_a_replica_that_alone_has_a_gradient_gives_it():
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    replicas = Replicas(model, ["cpu", "cpu"])
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    replicas.run(lambda m, x: m(x).sum().backward() if x.sum() else None, [one * 0, one])
    replicas.reduce_grads([1, 1])
    assert (model.weight.grad.item(), model.weight.grad.dtype) == (0.5, torch.bfloat16)


def test_tied_parameters_stay_tied_and_gradients_are_not_copied():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model(torch.ones(1, 2)).sum().backward()
    copied = Replicas(model, ["cpu", "cpu"]).models[1]
    assert copied[0].weight is copied[1].weight and copied[0].weight is not model[0].weight
    assert copied[0].weight.grad is None and model[0].weight.grad is not None


def test_broadcast_copies_parameters_and_buffers_in_place():
    model = torch.nn.BatchNorm1d(2)
    replicas = Replicas(model, ["cpu", "cpu"])
    pointers = [t.data_ptr() for t in replicas.models[1].state_dict().values()]
    model(torch.randn(8, 2))
    with torch.no_grad():
        model.weight.fill_(3)
    replicas.broadcast()
    other = replicas.models[1].state_dict()
    assert all(torch.equal(value, other[key]) for key, value in model.state_dict().items())
    assert [t.data_ptr() for t in other.values()] == pointers


def test_modes_set_on_the_model_reach_the_copies():
    model = torch.nn.Sequential(torch.nn.Dropout(0.9))
    replicas = Replicas(model, ["cpu", "cpu"])
    model.eval()
    assert all(torch.equal(out, torch.ones(9)) for out in replicas.run(lambda m, x: m(x), [torch.ones(9)] * 2))


def test_the_callers_state_holds_in_every_replica(lanes):
    replicas = Replicas(torch.nn.Linear(2, 2), ["cpu", "cpu"])

    def state(model, shard):
        return (
            threading.current_thread() is threading.main_thread(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            model(torch.ones(1, 2)).dtype,
        )

    main = lanes != "threads"
    assert replicas.run(state, [0, 1]) == [(main, True, False, torch.float32)] * 2
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert replicas.run(state, [0, 1]) == [(main, False, False, torch.bfloat16)] * 2
    with torch.inference_mode():
        assert replicas.run(state, [0, 1]) == [(main, False, True, torch.float32)] * 2


def test_an_exception_comes_through_and_leaves_no_thread(lanes):
    replicas = Replicas(torch.nn.Linear(1, 1), ["cpu", "cpu"])
    before = threading.active_count()

    def fails(model, shard):
        raise KeyError(shard)

    with pytest.raises(KeyError, match="first"):
        replicas.run(fails, ["first", "second"])
    assert threading.active_count() == before


@pytest.mark.slow
def test_replicas_may_lie_on_devices_of_several_kinds():
    replicas = Replicas(torch.nn.Linear(1, 2), ["cpu", torch.device("meta")])
    outputs = replicas.run(lambda m, x: m(x), [torch.ones(3, 1), torch.ones(2, 1, device="meta")])
    assert [(out.device.type, len(out)) for out in outputs] == [("cpu", 3), ("meta", 2)]


def test_threads_are_per_accelerator():
    d = torch.device
    assert module._lanes([d("cpu"), d("cpu")]) == [[0, 1]]
    assert module._lanes([d("cuda:0"), d("cuda:0")]) == [[0, 1]]
    assert module._lanes([d("cuda:0"), d("cpu")]) == [[0, 1]]
    assert module._lanes([d("cuda:0"), d("cuda:1"), d("cuda:0")]) == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r: r.run(backward, [1, 2, 3]), ValueError, "3 shards for 2 replicas"),
        (lambda r: r.run(backward, []), ValueError, "0 shards"),
        (lambda r: r.reduce_grads([]), ValueError, "0 sizes"),
        (lambda r: r.reduce_grads([1, 2, 3]), ValueError, "3 sizes"),
        (lambda r: r.reduce_grads([1, -1]), ValueError, "positive"),
        (lambda r: r.reduce_grads([1, 0]), ValueError, "positive"),
        (lambda r: Replicas(r.model, []), ValueError, "empty"),
        (lambda r: Replicas(r.model, 2), ValueError, "int alone"),
        (lambda r: Replicas(lambda x: x, ["cpu"]), TypeError, "Module"),
        (lambda r: Replicas(torch.nn.LazyLinear(1), ["cpu"]), ValueError, "lazy"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    replicas = Replicas(torch.nn.Linear(1, 1), ["cpu", "cpu"])
    with pytest.raises(error, match=message):
        call(replicas)


def test_a_size_for_every_shard_of_the_last_run():
    replicas = Replicas(torch.nn.Linear(1, 1), ["cpu", "cpu"])
    replicas.run(lambda m, x: m(x).mean().backward(), [torch.ones(3, 1), torch.ones(3, 1)])
    with pytest.raises(ValueError, match="the last run had 2 shards"):
        replicas.reduce_grads([3])


class Transfers(TorchDispatchMode):
    """Counts what is done, by name and by the device of the result."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in args if isinstance(x, torch.Tensor)]
        if isinstance(out, torch.Tensor) and inputs and any(x.device != out.device for x in inputs):
            self.done.append(("moved", str(func)))
        elif str(func) == "aten.clone.default":
            self.done.append(("cloned", out.device.type))
        return out


def mixed_net():
    layers = [torch.nn.Linear(3, 3) for _ in range(10)]
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2).bfloat16())


@pytest.mark.slow
def test_copies_are_made_on_their_own_devices():
    model = mixed_net()
    with Transfers() as transfers:
        replicas = Replicas(model, ["cpu", torch.device("meta"), torch.device("meta")])
    assert ("cloned", "cpu") not in transfers.done
    for replica in replicas.models[1:]:
        assert {tensor.device.type for tensor in replica.state_dict().values()} == {"meta"}
        assert [p.requires_grad for p in replica.parameters()] == [p.requires_grad for p in model.parameters()]


@pytest.mark.last
def test_a_broadcast_is_one_copy_per_dtype_and_replica():
    replicas = Replicas(mixed_net(), ["cpu", torch.device("meta"), torch.device("meta")])
    with Transfers() as transfers:
        replicas.broadcast()
    # float32, bfloat16, and the int64 of the batch norm's counter.
    assert [what for what, _ in transfers.done].count("moved") == 2 * 3


def test_what_is_copied_in_one_go_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "BUCKET_BYTES", 100)
    tensors = [torch.zeros(10), torch.zeros(10), torch.zeros(10), torch.zeros(100), torch.zeros(5), torch.zeros(0)]
    assert module._buckets(tensors) == [[0, 1], [2], [3], [4, 5]]


def test_tensors_that_are_sent_together_arrive_as_they_were():
    tensors = [
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(3, 4).T,
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(5).expand(2, 5),
    ]
    for sent, tensor in zip(module._sent(tensors, torch.device("cpu")), tensors, strict=True):
        assert torch.equal(sent, tensor)
        assert sent.data_ptr() != tensor.data_ptr() or not tensor.numel()


def test_gradients_of_another_device_are_one_copy_per_dtype(monkeypatch):
    """Every gradient counts as one of another device here, and is copied."""
    model = mixed_net()
    replicas = Replicas(model, ["cpu", "cpu"])
    sent = []

    def send(tensors, device):
        sent.append([tensor.shape for tensor in tensors])
        return [tensor.clone() for tensor in tensors]

    real = module._moved
    monkeypatch.setattr(module, "_sent", send)
    monkeypatch.setattr(module, "_moved", lambda tensors, device: real(tensors, torch.device("meta")))
    for replica in replicas.models:
        for parameter in replica.parameters():
            parameter.grad = torch.ones_like(parameter)
    replicas.reduce_grads([1, 3])
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert len(sent) == 2 * 2  # float32 and bfloat16, of both replicas


def test_parameters_of_a_class_of_their_own_are_copied_as_they_know_how():
    class Own(torch.nn.Parameter):
        pass

    model = torch.nn.Linear(2, 2)
    model.weight = Own(model.weight.detach())
    model.register_buffer("marked", torch.ones(1))
    model.marked.note = "kept"
    copied = Replicas(model, ["cpu", "cpu"]).models[1]
    assert type(copied.weight) is Own and copied.weight is not model.weight
    assert copied.marked.note == "kept" and copied.marked is not model.marked
