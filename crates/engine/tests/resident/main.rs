//! Tests with budgets so tight that it matters what else the process has resident, from which a plan starts. They are a program of
//! their own and run one at a time, because other tests would change that meanwhile.

use std::sync::{Mutex, MutexGuard, PoisonError};

#[allow(dead_code, reason = "the other program uses the rest")]
#[path = "../common/mod.rs"]
mod common;

mod budget;
mod context;
mod crowd;
mod grammar;
mod slots;

/// Held by the test that runs.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
