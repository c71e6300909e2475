//! The thread that computes: it owns the crowd of requests, and takes every step.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::{Ending, Observer};
use crate::blocks::Cancel;
use crate::driver::crowd::{Crowd, CrowdOptions, Listener};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::generate::Request;

/// A request, and who listens to its answer.
pub(super) struct Job {
    pub request: Request,
    pub cancel: Cancel,
    pub listener: Box<dyn Listener>,
}

/// Whether the thread goes on, and if not, why.
#[derive(Clone)]
pub(super) struct Fate {
    engine: Engine,
    leave: Cancel,
}

impl Fate {
    pub fn new(engine: &Engine, leave: Cancel) -> Fate {
        Fate { engine: engine.clone(), leave }
    }

    pub fn leave(&self) {
        self.leave.cancel();
    }

    /// What is told to those who get no answer, where the thread has ended.
    pub fn error(&self) -> Error {
        match self.engine.lost() {
            Some(why) => Error::DeviceLost(why.to_owned()),
            None if self.leave.is_cancelled() => Error::Cancelled,
            None => Error::Backend("the thread that computes has ended by a bug".into()),
        }
    }
}

/// What the thread has.
pub(super) struct Work {
    pub engine: Engine,
    pub options: CrowdOptions,
    pub idle: Duration,
    pub jobs: Receiver<Job>,
    pub fate: Fate,
    pub observer: Option<Arc<dyn Observer>>,
}

impl Work {
    pub fn run(self) {
        let observer = self.observer.clone();
        // What panics is a bug. Whoever waits is told by the end of its channel.
        let ended = catch_unwind(AssertUnwindSafe(move || self.drive()));
        let ending = ended.unwrap_or_else(|_| {
            tracing::error!("computing failed for good: a new driver has to be started");
            Ending::Panicked
        });
        if let Some(observer) = observer {
            observer.ends(ending);
        }
    }

    fn drive(self) -> Ending {
        let mut crowd = Crowd::new(&self.engine, self.options.clone());
        match self.answer(&mut crowd) {
            Ok(()) => crowd.save_prefixes(),
            Err(Error::DeviceLost(why)) => {
                // Those who came meanwhile.
                for job in self.jobs.try_iter() {
                    job.listener.end(Err(Error::DeviceLost(why.clone())));
                }
                return Ending::DeviceLost;
            }
            Err(_) => {
                crowd.end_all(&Error::Cancelled);
                for job in self.jobs.try_iter() {
                    job.listener.end(Err(Error::Cancelled));
                }
                crowd.save_prefixes();
            }
        }
        Ending::Asked
    }

    /// Answers until all is answered and nothing more can come.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if all are to end; [`Error::DeviceLost`] if nothing can be computed any more.
    fn answer(&self, crowd: &mut Crowd) -> Result<()> {
        // Whether something happened since what is worth keeping was written.
        let mut stale = false;
        loop {
            self.fate.leave.check()?;
            if crowd.is_empty() {
                self.tell(|observer| observer.rests());
                self.look(crowd);
                let next = match (self.jobs.recv_timeout(self.idle), stale) {
                    (Err(RecvTimeoutError::Timeout), true) => {
                        crowd.save_prefixes();
                        stale = false;
                        continue;
                    }
                    (Err(RecvTimeoutError::Timeout), false) => match self.jobs.recv() {
                        Ok(job) => job,
                        Err(_) => return Ok(()),
                    },
                    (Err(RecvTimeoutError::Disconnected), _) => return Ok(()),
                    (Ok(job), _) => job,
                };
                stale = true;
                crowd.add(next.request, next.cancel, next.listener);
            }
            for job in self.jobs.try_iter() {
                crowd.add(job.request, job.cancel, job.listener);
            }
            self.look(crowd);
            let start = Instant::now();
            self.tell(|observer| observer.begins_step());
            let idle = crowd.idle_steps();
            // What concerns a request is told to its listener; only leaving concerns all.
            let tokens = crowd.step(&self.fate.leave)?;
            self.tell(|observer| match crowd.idle_steps() > idle {
                true => observer.idles(),
                false => observer.ends_step(start.elapsed(), tokens),
            });
            self.look(crowd);
            if let Some(why) = self.engine.lost() {
                return Err(Error::DeviceLost(why.to_owned()));
            }
        }
    }

    fn look(&self, crowd: &Crowd) {
        self.tell(|observer| observer.looks(crowd));
    }

    fn tell(&self, what: impl FnOnce(&dyn Observer)) {
        if let Some(observer) = &self.observer {
            what(&**observer);
        }
    }
}
