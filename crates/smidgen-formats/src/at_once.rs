//! Runs tasks in parallel, one thread each.
//!
//! Used for work on files, before a device exists. Left out: a thread pool, because a task takes far longer
//! than starting a thread.

/// Runs all tasks and returns the error of the first task that failed, in list order. A single task runs on
/// this thread.
pub fn at_once<E: Send>(tasks: Vec<impl FnOnce() -> Result<(), E> + Send>) -> Result<(), E> {
    if tasks.len() <= 1 {
        return tasks.into_iter().try_for_each(|task| task());
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = tasks.into_iter().map(|task| scope.spawn(task)).collect();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        results
            .into_iter()
            .try_for_each(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_and_the_first_error_is_returned() {
        let mut done = [false; 5];
        let tasks = done.iter_mut().enumerate().map(|(index, done)| {
            move || {
                *done = true;
                if index % 2 == 1 { Err(index) } else { Ok(()) }
            }
        });
        assert_eq!(at_once(tasks.collect()), Err(1));
        assert_eq!(done, [true; 5]);
    }
}
