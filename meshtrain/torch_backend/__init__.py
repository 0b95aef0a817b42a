"""The torch.distributed backend `meshtrain`: process groups whose bytes travel over the daemons' links.

    import meshtrain.torch_backend
    torch.distributed.init_process_group("meshtrain")

In a job neither line is needed: there a script's `init_process_group` makes such a group by itself, whichever backend
of CPU tensors it names (`meshtrain.masquerade`).
"""

from meshtrain.torch_backend.registration import register

register()
