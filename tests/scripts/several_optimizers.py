"""Two optimizers that step in turns, one twice as often; or one optimizer per parameter, inside backward."""

import sys

import torch


def in_turns():
    models = [torch.nn.Linear(8, 8).cuda() for _ in range(2)]
    often, seldom = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    for number in range(20):
        models[0](torch.ones(1, 8, device="cuda")).sum().backward()
        often.step()
        print("often", flush=True)
        if number % 2:
            models[1](torch.ones(1, 8, device="cuda")).sum().backward()
            seldom.step()
            print("seldom", flush=True)


def in_backward():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for _ in range(20):
        model(torch.ones(1, 8, device="cuda")).sum().backward()
        print("backward", flush=True)


{"in-turns": in_turns, "in-backward": in_backward}[sys.argv[1]]()
