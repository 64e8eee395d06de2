"""onnxruntime and other engines: what is known of their releases, and sessions that run a model.

    releases               what was measured of each release
    session                graphs of our own, in this process
    process, limits        a process for a model that anyone wrote, and what it may take
    child, worker, frames  inside of that process: requests, and the sessions of other engines
    engine                 what a session is, and that of onnxruntime

A model that anyone wrote is loaded and run in a process of its own.
"""
