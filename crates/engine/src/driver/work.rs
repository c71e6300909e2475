//! The driver's thread: it owns the crowd of requests and computes every step.

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

/// A request and its listener.
pub(super) struct Job {
    pub request: Request,
    pub cancel: Cancel,
    pub listener: Box<dyn Listener>,
}

/// Whether the thread still runs, and if not, why it ended.
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

    /// The error for requests that get no answer because the thread has ended.
    pub fn error(&self) -> Error {
        match self.engine.lost() {
            Some(why) => Error::DeviceLost(why.to_owned()),
            None if self.leave.is_cancelled() => Error::Cancelled,
            None => {
                Error::Backend("the computing thread panicked, which is a bug: start a new driver".into())
            }
        }
    }
}

/// Everything that the thread owns.
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
        // A panic is a bug. Waiting threads notice it when their channels close.
        let ended = catch_unwind(AssertUnwindSafe(move || self.drive()));
        let ending = ended.unwrap_or_else(|_| {
            tracing::error!("the computing thread panicked, which is a bug: start a new driver");
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
                // Requests that arrived meanwhile.
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

    /// Computes steps until all requests are answered and no more can come.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if the driver is cancelled; [`Error::DeviceLost`] if nothing can be computed any more.
    fn answer(&self, crowd: &mut Crowd) -> Result<()> {
        // Whether anything changed since kept conversations were written.
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
            // Errors of single requests go to their listeners. Only a cancelled driver and a lost device end up here.
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
