"""The simulator: a run on a network clock, with the schedule, the round protocol and the byte counts that train.

    methods     what trains, by the trainer's words
    scenario    what is simulated: a method, a workload, links, islands, faults, how long
    script      a `Schedule` as what an island does in order: compute, launch a round, let one land
    faults      kill, stop, leave, join: by rates or from a file
    clock       virtual time: a queue of events
    fabric      bytes on their way, sharing each island's link fairly
    averaging   one attempt of a round: encode, the phases of sending, done
    island      one island: trains by its script, speaks the protocol
    world       all of it in messages: `Membership` itself decides; some hundred islands
    rounds      the same in whole rounds, vectorised over islands: ten thousand of them
    tracks      who did what when, added up and, for some islands, kept
    outcome     what came of it, as data
    plot, show  as a picture, in the terminal; loss_plot: losses against simulated time

Nothing sleeps, nothing is sent, and one seed is one history.
"""
