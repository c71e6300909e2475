//! What the GPU is given to do, in order, and what is kept until it has done it.

use std::collections::VecDeque;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use forebay_engine::{Error, Result};

use crate::device::Gpu;
use crate::profile::Work;

/// Something that commands use. It is dropped when they have ended.
pub type Kept = Box<dyn Send>;

/// Command buffers that were submitted together.
#[derive(Clone)]
pub struct Submission {
    /// A larger number for a later submission.
    number: u64,
    index: wgpu::SubmissionIndex,
}

/// Command buffers on their way.
#[derive(Default)]
pub struct Commands {
    /// Those that are submitted with whatever is submitted next, and what they use.
    closed: Vec<wgpu::CommandBuffer>,
    kept: Vec<Kept>,
    /// The number of the last submission.
    submitted: u64,
    /// What submissions use that may not have ended.
    under_way: VecDeque<(Submission, Vec<Kept>)>,
}

impl Gpu {
    fn lock_commands(&self) -> MutexGuard<'_, Commands> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits a command buffer with whatever is submitted next, and keeps what it uses until it has ended.
    pub fn submit_later(&self, commands: wgpu::CommandBuffer, kept: Vec<Kept>) {
        let mut queue = self.lock_commands();
        queue.closed.push(commands);
        queue.kept.extend(kept);
    }

    /// Whether there are command buffers that were not submitted.
    pub fn has_closed(&self) -> bool {
        !self.lock_commands().closed.is_empty()
    }

    /// Submits all command buffers. Returns the submission, if there was any.
    ///
    /// # Errors
    /// If the GPU failed before.
    pub fn submit(&self) -> Result<Option<Submission>> {
        let submission = self.submit_closed();
        self.check()?;
        Ok(submission)
    }

    /// Like [`submit`](Self::submit), but leaves errors to whoever asks next.
    pub fn submit_closed(&self) -> Option<Submission> {
        let mut queue = self.lock_commands();
        let closed = std::mem::take(&mut queue.closed);
        if closed.is_empty() {
            return None;
        }
        self.counts.add_submission();
        queue.submitted += 1;
        let index = self.clock.time(Work::Submitting, || self.queue.submit(closed));
        let submission = Submission { number: queue.submitted, index };
        let kept = std::mem::take(&mut queue.kept);
        if !kept.is_empty() {
            queue.under_way.push_back((submission.clone(), kept));
        }
        Some(submission)
    }

    /// Drops what was kept for submissions that have ended. With `wait`, it waits for the first of them. Returns whether
    /// there was any.
    ///
    /// # Errors
    /// If the GPU failed.
    pub fn release(&self, wait: bool) -> Result<bool> {
        let mut dropped = false;
        loop {
            let first = self.lock_commands().under_way.front().map(|(submission, _)| submission.clone());
            let Some(first) = first else { return Ok(dropped) };
            if wait && !dropped {
                self.wait(Some(&first))?;
            } else if self.has_ended(&first)? {
                self.drop_kept(first.number);
            } else {
                return Ok(dropped);
            }
            dropped = true;
        }
    }

    /// Waits until everything that was submitted has ended, or everything up to `submission`.
    ///
    /// # Errors
    /// If the GPU failed.
    pub fn wait(&self, submission: Option<&Submission>) -> Result<()> {
        self.counts.add_wait();
        let number = submission.map_or_else(|| self.lock_commands().submitted, |last| last.number);
        self.poll(submission, None)?;
        self.drop_kept(number);
        Ok(())
    }

    /// Whether a submission has ended.
    fn has_ended(&self, submission: &Submission) -> Result<bool> {
        self.poll(Some(submission), Some(Duration::ZERO))
    }

    /// Waits, and returns whether the submissions have ended.
    fn poll(&self, submission: Option<&Submission>, timeout: Option<Duration>) -> Result<bool> {
        let submission_index = submission.map(|submission| submission.index.clone());
        let wait = wgpu::PollType::Wait { submission_index, timeout };
        let polled = self.clock.time(Work::Waiting, || self.device.poll(wait));
        self.check()?;
        match polled {
            Ok(_) => Ok(true),
            Err(wgpu::PollError::Timeout) => Ok(false),
            Err(error) => Err(Error::DeviceLost(format!("{} does not answer: {error}", self.name()))),
        }
    }

    /// Drops what was kept for submissions up to this number.
    fn drop_kept(&self, number: u64) {
        let mut queue = self.lock_commands();
        let ended = queue.under_way.partition_point(|(submission, _)| submission.number <= number);
        let kept: Vec<_> = queue.under_way.drain(..ended).collect();
        // What is dropped may take locks of its own.
        drop(queue);
        drop(kept);
    }
}
