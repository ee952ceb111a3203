"""Processes of tests, forked or spawned. In a module of its own, which spawned ones can import."""

import multiprocessing


def put_result(results, function, arguments) -> None:
    try:
        results.put((function(*arguments), None))
    except BaseException as error:
        results.put((None, error))


def in_children(start_method: str, function, *arguments: tuple) -> list:
    """The results of processes that run at once, in any order; a pool would pickle what a fork just has."""
    context = multiprocessing.get_context(start_method)
    results = context.Queue()
    processes = [context.Process(target=put_result, args=(results, function, each)) for each in arguments]
    for process in processes:
        process.start()
    got = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    if errors := [error for _, error in got if error is not None]:
        raise errors[0]
    return [result for result, _ in got]


def end_of_fork(function, *arguments, within_s: float = 60) -> int | None:
    """The exit status of a fork that calls this: negative for a signal, None for one that does not end."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join(within_s)
    status = process.exitcode
    process.kill()
    process.join()
    return status
