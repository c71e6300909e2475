//! The thread that computes: it owns the crowd of requests, and takes every step.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_engine::{Cancel, Crowd, CrowdOptions, Engine, Error, Listener, Request};
use tokio::sync::oneshot;

use super::meters::Meters;

/// With nothing to do for so long, what is worth keeping is written. People think between two turns for less than that, and
/// each of their turns makes what was written of the last one worthless.
const IDLE: Duration = Duration::from_secs(30);

/// A request, and who listens to its answer.
pub struct Job {
    pub request: Request,
    pub cancel: Cancel,
    pub listener: Box<dyn Listener>,
}

/// The other side of the worker's thread.
pub struct Worker {
    jobs: Sender<Job>,
    /// Ends the step that is being computed, when the program leaves.
    leave: Cancel,
}

impl Worker {
    /// Starts the thread. It ends when the worker is dropped and all that was asked for is answered, or when nothing can be
    /// computed any more; `ended` is then dropped.
    pub fn start(
        engine: Engine,
        options: CrowdOptions,
        meters: Arc<Meters>,
        ended: oneshot::Sender<()>,
    ) -> std::io::Result<(Worker, JoinHandle<()>)> {
        let (jobs, receiver) = channel();
        let leave = Cancel::default();
        let left = leave.clone();
        let thread = std::thread::Builder::new().name("worker".into()).spawn(move || {
            let work = Work { engine, options, jobs: receiver, leave: left, meters: Arc::clone(&meters) };
            // Dropped with the thread's end, which is what it tells.
            let _ended = ended;
            // What panics is our fault. Whoever waits is told by the end of its channel.
            if catch_unwind(AssertUnwindSafe(|| work.run())).is_err() {
                meters.died();
                tracing::error!("computing failed for good: the server has to be started again");
            }
        })?;
        Ok((Worker { jobs, leave }, thread))
    }

    /// Gives the worker more to do; false where there is no worker any more.
    pub fn add(&self, job: Job) -> bool {
        self.jobs.send(job).is_ok()
    }

    /// Ends what is being computed, within a layer.
    pub fn leave(&self) {
        self.leave.cancel();
    }
}

/// What the thread has.
struct Work {
    engine: Engine,
    options: CrowdOptions,
    jobs: Receiver<Job>,
    leave: Cancel,
    meters: Arc<Meters>,
}

impl Work {
    fn run(&self) {
        let mut crowd = Crowd::new(&self.engine, self.options.clone());
        // Whether something happened since what is worth keeping was written.
        let mut stale = false;
        loop {
            if crowd.is_empty() {
                self.meters.rest();
                self.meters.crowd(&crowd);
                let next = match (self.jobs.recv_timeout(IDLE), stale) {
                    (Err(RecvTimeoutError::Timeout), true) => {
                        crowd.save_prefixes();
                        self.meters.crowd(&crowd);
                        stale = false;
                        continue;
                    }
                    (Err(RecvTimeoutError::Timeout), false) => match self.jobs.recv() {
                        Ok(job) => job,
                        Err(_) => break,
                    },
                    (Err(RecvTimeoutError::Disconnected), _) => break,
                    (Ok(job), _) => job,
                };
                stale = true;
                crowd.add(next.request, next.cancel, next.listener);
            }
            for job in self.jobs.try_iter() {
                crowd.add(job.request, job.cancel, job.listener);
            }
            self.meters.crowd(&crowd);
            let start = Instant::now();
            self.meters.begin_step();
            let idle = crowd.idle_steps();
            match crowd.step(&self.leave) {
                Ok(_) if crowd.idle_steps() > idle => self.meters.idled(),
                Ok(tokens) => self.meters.stepped(start.elapsed(), tokens),
                // What concerns a request is told to its listener; only leaving concerns all.
                Err(_) => break,
            }
            self.meters.crowd(&crowd);
            if let Some(why) = self.engine.lost() {
                // Those who came meanwhile.
                for job in self.jobs.try_iter() {
                    job.listener.end(Err(Error::DeviceLost(why.to_owned())));
                }
                return;
            }
        }
        crowd.save_prefixes();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::mpsc;

    use forebay_engine::{Answer, Event, Options, Result};

    use super::*;

    /// Panics, or passes on how the answer ended; dropped without an end it says so by being gone.
    struct Ear {
        panics: bool,
        ended: mpsc::Sender<bool>,
    }

    impl Listener for Ear {
        fn event(&mut self, _: Event<'_>) {
            assert!(!self.panics, "as the test wants it");
        }

        fn end(self: Box<Self>, answer: Result<Answer>) {
            let _ = self.ended.send(answer.is_ok());
        }
    }

    #[test]
    fn a_panic_ends_all_that_is_being_answered_and_is_told() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales-qwen3moe-Q4_K_M.gguf");
        let engine = Engine::open(&model, &Options { threads: Some(1), ..Options::default() }).unwrap();
        let prompt = engine.tokenizer().encode("Once upon a time", Default::default()).unwrap();
        let meters = Arc::new(Meters::default());
        let (worker, thread) =
            Worker::start(engine.clone(), CrowdOptions::new(4), Arc::clone(&meters), oneshot::channel().0)
                .unwrap();
        let job = |panics| {
            let (ended, end) = mpsc::channel();
            let request = Request { max_tokens: Some(4), ..Request::new(&engine, prompt.clone()).unwrap() };
            (Job { request, cancel: Cancel::default(), listener: Box::new(Ear { panics, ended }) }, end)
        };
        let (fine, end) = job(false);
        assert!(worker.add(fine));
        assert_eq!(end.recv(), Ok(true));
        assert_eq!(meters.ailment(), None);
        let (panics, end) = job(true);
        assert!(worker.add(panics));
        assert!(end.recv().is_err(), "nobody is left to answer");
        thread.join().unwrap();
        assert!(meters.ailment().unwrap().contains("start the server again"));
        assert!(!worker.add(job(false).0));
    }
}
