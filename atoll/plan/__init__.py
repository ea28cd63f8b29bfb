"""The planner: what a run will take in time, bytes and memory, before anything is spent.

    shapes, presets     models as lists of tensor shapes; nothing is built
    links               what joins the islands: bandwidth and latency, one number or a matrix
    cost                closed forms: sync time, utilisation, speed-up, what would hide a sync
    payload             bytes a round, from the compressors' own declarations
    clock               a sync schedule run on a clock: where training waits for the link
    estimate            one method on one link: round time, rate, utilisation
    recommend           which method, why, and the settings that run it
    memory, scaling     bytes a worker by state; loss and rates by the published laws
    measure             step and sync times taken from a real run
    streaming_table     a published table of bandwidths, computed again

Imports nothing of the trainer: both read the same `Schedule` and the same `sent_bytes`.
"""
