"""Large tensors of the host hold, when somebody looks, what they would have held: it cannot be noticed.

The truth comes from generators of the script's own, whose numbers are never put off.
"""

import copy
import io

import numpy
import torch

N = 1 << 19


def truth(seed):
    return torch.Generator().manual_seed(seed)


def numbers_are_those_that_would_have_been_drawn():
    for make, dtype in (("randn", torch.float32), ("rand", torch.float32), ("randn", torch.float64)):
        for shape in ((1024, 512), (7, 100_003)):
            torch.manual_seed(3)
            own = truth(3)
            for _ in range(2):
                got = getattr(torch, make)(*shape, dtype=dtype)
                expected = getattr(torch, make)(*shape, dtype=dtype, generator=own)
                assert torch.equal(got, expected), (make, dtype, shape)
            assert torch.equal(torch.rand(5), torch.rand(5, generator=own))


def what_nobody_looks_at_leaves_the_generator_where_it_would_be():
    torch.manual_seed(5)
    for _ in range(6):
        torch.nn.Linear(1024, 1023)
    own = truth(5)
    for _ in range(6):
        torch.empty(1024 * 1023).uniform_(generator=own), torch.empty(1023).uniform_(generator=own)
    assert torch.equal(torch.randperm(50), torch.randperm(50, generator=own))


def layers_have_their_values():
    torch.manual_seed(7)
    layer = torch.nn.Linear(1024, 1024)
    own = truth(7)
    bound = 1 / 1024**0.5
    weight = torch.empty(1024, 1024).uniform_(-bound, bound, generator=own)
    bias = torch.empty(1024).uniform_(-bound, bound, generator=own)
    state = torch.get_rng_state()
    assert torch.equal(state, own.get_state())
    assert torch.allclose(layer.weight, weight, rtol=1e-6) and torch.allclose(layer.bias, bias, rtol=1e-6)
    x = torch.rand(4, 1024)
    layer(x).sum().backward()
    assert torch.allclose(layer.weight.grad, x.sum(0).expand(1024, 1024), rtol=1e-5)


def a_row_of_operations_is_one():
    torch.manual_seed(1)
    got = torch.empty(1024, 512)
    torch.nn.init.trunc_normal_(got, std=0.02)
    view = got[3]
    view.zero_()
    got[:, :4].fill_(2.0)
    half = got.to(torch.bfloat16).clone()
    got.mul_(3.0)
    expected = torch.empty(1024, 512)
    torch.nn.init.trunc_normal_(expected, std=0.02, generator=truth(1))
    expected[3].zero_()
    expected[:, :4] = 2.0
    assert torch.equal(half, expected.bfloat16())
    assert torch.equal(got, expected * 3.0) and torch.equal(view, expected[3] * 3.0)


def copies_are_of_what_was_there():
    source = torch.full((1024, 512), 2.0)
    target = torch.zeros(1024, 512)
    target.copy_(source)
    source.fill_(5.0)
    deep = copy.deepcopy(torch.nn.Parameter(target))
    assert target.sum().item() == 2.0 * N and deep.sum().item() == 2.0 * N
    target.copy_(torch.arange(N).reshape(1024, 512))
    assert target[0, 7].item() == 7.0 and source[5, 5].item() == 5.0


def every_way_to_look_sees_the_values():
    def made():
        return torch.full((1024, 512), 3.0)

    assert made().numpy()[5, 5] == 3.0 and numpy.asarray(made()).mean() == 3.0
    assert made()[2, 3].tolist() == 3.0 and float(made()[1, 1]) == 3.0
    buffer = io.BytesIO()
    torch.save(made(), buffer)
    buffer.seek(0)
    assert torch.load(buffer).mean().item() == 3.0
    assert made().half().cuda().cpu().shape == (1024, 512)


def files_are_mapped():
    weights = torch.load("large.pt")  # 0, 1, 2 … as 4096 rows of floats
    layer = torch.nn.Linear(4096, 4096, bias=False)
    layer.load_state_dict({"weight": weights["w"]})
    del weights
    assert layer.weight[1, 2].item() == 4098.0
    torch.save({"w": layer.weight.detach() + 1}, "large.pt")
    again = torch.load("large.pt")["w"]
    torch.save({}, "large.pt")  # what is read from the script's own file must not be mapped
    assert again[1, 2].item() == 4099.0
    torch.save({"w": layer.weight.detach()}, "large.pt")
    layer.load_state_dict({"weight": torch.load("large.pt")["w"]})
    assert layer.cuda().weight.is_cuda


numbers_are_those_that_would_have_been_drawn()
what_nobody_looks_at_leaves_the_generator_where_it_would_be()
layers_have_their_values()
a_row_of_operations_is_one()
copies_are_of_what_was_there()
every_way_to_look_sees_the_values()
files_are_mapped()
print("all true")
