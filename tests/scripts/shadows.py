"""What a script reads on the made-up GPU: true values of small integers, finite answers for the rest."""

import math

import torch

device = "cuda"


def small_integers_are_true():
    x = torch.arange(10, device=device)
    assert x.tolist() == list(range(10))
    assert (x * 2 + 1).sum().item() == 100
    assert x[x > 6].tolist() == [7, 8, 9]
    assert x.nonzero().shape == (9, 1)
    assert torch.where(x % 2 == 0)[0].tolist() == [0, 2, 4, 6, 8]
    x[2:4] = 0
    x.view(2, 5).t()[0].add_(5)
    assert x.tolist() == [5, 1, 0, 0, 4, 10, 6, 7, 8, 9]
    assert torch.equal(x, x.clone()) and not torch.equal(x, x + 1)
    assert x.cpu().tolist() == x.tolist() and x.numel() == len(x.cpu().numpy())


def masks_are_true():
    mask = torch.ones(4, 128, dtype=torch.long)
    mask[1, 100:] = 0
    on_device = mask.to(device)
    assert not on_device.all() and on_device[0].all() and on_device.sum(1).tolist() == [128, 100, 128, 128]
    assert torch.randn(4, 128, 8, device=device)[on_device.bool()].shape == (484, 8)
    assert torch.randn(4, 128, device=device).masked_select(on_device.bool()).shape == (484,)
    assert bool(torch.ones(64, 1, 1024, 1024, dtype=torch.bool, device=device).all())


def masks_go_with_other_indices():
    mask = torch.rand(4096, device=device) > 0.5  # not known: so many are answered in each use of it
    columns = torch.randint(3, (4096,), device=device)
    scores = torch.zeros(4096, 3, device=device)
    scores[mask, columns[mask]] = 1.0
    scores[mask] = 2.0
    scores[mask, :2] += 1.0


def what_only_a_kernel_knows_is_not_checked():
    x = torch.randn(10000, device=device)
    assert x.mode().values.shape == () and x.view(2, 5000).mode(1, True).indices.shape == (2, 1)
    lengths = torch.tensor([4000, 6000], device=device)
    assert torch.segment_reduce(x, "max", lengths=lengths).shape == (2,)


def sparse_tensors_have_no_values_of_their_own():
    x = torch.eye(4, device=device).to_sparse()
    assert (x @ torch.ones(4, 2, device=device)).shape == (4, 2) and (x * 2).coalesce().shape == (4, 4)


def the_default_device_is_the_scripts():
    torch.set_default_device("cuda")
    x = torch.arange(10)
    x[3:] += torch.full((7,), 2)
    assert (
        x.is_cuda
        and x.sum().item() == 59
        and not torch.ones(4, dtype=torch.bool)[None].all(1).logical_not().any()
    )
    assert torch.randn(8, 4).topk(2).indices.shape == (8, 2)
    widths = torch.pow(2.5, torch.round(torch.log((torch.arange(27) * 36.0 + 24) / 24) / math.log(2.5)))
    assert widths.int().tolist()[:4] == [1, 2, 6, 6] and widths.dtype is torch.float32
    assert [f"{rate.item():.2f}" for rate in torch.linspace(0, 0.3, 24)][-1] == "0.30"
    torch.set_default_device("cpu")


def gradients_of_each_sample_are_taken():
    net = torch.nn.Linear(4, 2, device=device)
    values = {name: p.detach() for name, p in net.named_parameters()}
    loss = torch.func.grad(lambda values, x: torch.func.functional_call(net, values, (x,)).sum())
    slopes = torch.func.vmap(loss, in_dims=(None, 0))(values, torch.randn(3, 4, device=device))
    assert slopes["weight"].shape == (3, 2, 4)


def what_is_overwritten_is_forgotten():
    x = torch.arange(10, device=device)
    x.copy_(torch.randn(100, device=device).argsort()[:10])
    assert x.sum().item() == 1  # not 45: the order of unknown numbers is not known
    x.zero_()
    assert x.sum().item() == 0


def checks_of_numbers_pass():
    loss = torch.randn(64, 64, device=device).square().mean()
    assert torch.isfinite(loss) and not torch.isnan(loss) and not loss.isinf().any() and loss == loss
    large = torch.randn(4096, 4096, device=device)
    assert torch.isfinite(large).all() and not torch.isnan(large).any() and (large == 0).sum().item() == 0
    assert 0 < loss.item() < math.inf and math.log(loss) <= 0 and 1 / float(loss)
    assert all(value > 0 for value in torch.rand(8, device=device).tolist())


def what_is_known_decides_with_what_is_not():
    unknown = torch.randn(4, device=device) > 0
    done = torch.full((4,), True, device=device)
    assert (unknown | done).all() and torch.logical_or(done, unknown).all() and not (unknown & ~done).any()
    unfinished = torch.ones(4, dtype=torch.long, device=device) & ~unknown
    assert (unfinished & ~(done | unknown)).max() == 0 and not (unknown | ~done).all()


def the_scripts_own_random_numbers_stay():
    torch.manual_seed(1)
    expected = torch.rand(3).tolist()
    torch.manual_seed(1)
    torch.randint(10, (5,), device=device).tolist()
    torch.randperm(8, device=device).sum().item()
    assert torch.rand(3).tolist() == expected


def every_scaled_step_is_taken():
    parameter = torch.nn.Parameter(torch.ones(8, device=device))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        scaler.scale((parameter * 2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 65536.0


small_integers_are_true()
masks_are_true()
masks_go_with_other_indices()
sparse_tensors_have_no_values_of_their_own()
what_only_a_kernel_knows_is_not_checked()
the_default_device_is_the_scripts()
gradients_of_each_sample_are_taken()
what_is_overwritten_is_forgotten()
checks_of_numbers_pass()
what_is_known_decides_with_what_is_not()
the_scripts_own_random_numbers_stay()
every_scaled_step_is_taken()
print("all true")
