"""A GAN: two models, each with an optimizer of its own.

    meshtrain submit gan.py

`mt.prepare` takes both at once, the optimizers in the order in which they step. Each backward pass is a round, for one.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshtrain as mt

EPOCHS = 10
NOISE = 8


def circle(points: int) -> Tensor:
    """What the generator shall learn to draw."""
    angle = torch.rand(points, generator=torch.Generator().manual_seed(1)) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], 1)


torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 2))
critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
loader = DataLoader(TensorDataset(circle(2048)), batch_size=64, shuffle=True)
(generator, critic), (of_critic, of_generator), loader = mt.prepare(
    [generator, critic], [of_critic, of_generator], loader
)
dice = torch.Generator().manual_seed(1000 + mt.rank())  # other noise on each laptop
judge = nn.functional.binary_cross_entropy_with_logits

for epoch in range(EPOCHS):
    for (real,) in loader:
        noise = torch.randn(len(real), NOISE, generator=dice)

        of_critic.zero_grad()
        on_real, on_drawn = critic(real), critic(generator(noise).detach())
        critic_loss = judge(on_real, torch.ones_like(on_real)) + judge(on_drawn, torch.zeros_like(on_drawn))
        critic_loss.backward()
        of_critic.step()

        of_generator.zero_grad()
        on_drawn = critic(generator(noise))
        generator_loss = judge(on_drawn, torch.ones_like(on_drawn))
        generator_loss.backward()
        of_generator.step()
        mt.log(critic=critic_loss, generator=generator_loss)
    if mt.is_main():
        radius = generator(torch.randn(256, NOISE, generator=dice)).norm(dim=1).mean()
        print(f"epoch {epoch + 1}: drawn points are {radius.item():.2f} from the middle", flush=True)
mt.finish()
