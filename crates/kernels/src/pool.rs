//! A fork-join thread pool. Starting a parallel loop takes a few microseconds and no allocation, and threads without
//! work sleep.
//!
//! The caller divides the work into pieces. Any thread may compute any piece, so results must not depend on that.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::tensor::TileMut;

/// How long a thread without work spins before it sleeps.
const WATCH: Duration = Duration::from_micros(50);

/// Threads that run parallel loops together with the caller.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Only one loop runs at a time.
    turn: Mutex<()>,
}

/// The size of the pieces a matrix is cut into.
#[derive(Clone, Copy, Debug)]
pub struct Grain {
    /// Rows of a piece.
    pub rows: usize,
    /// Columns of a piece.
    pub cols: usize,
}

/// Which piece of which matrix a call computes.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The index of the matrix.
    pub matrix: usize,
    /// Rows of that matrix.
    pub rows: Range<usize>,
    /// Columns of that matrix.
    pub cols: Range<usize>,
}

impl Pool {
    /// A pool of `threads` threads, including the caller's.
    ///
    /// # Errors
    /// If the operating system starts no more threads.
    pub fn new(threads: usize) -> std::io::Result<Pool> {
        let threads = threads.max(1);
        let shared = Arc::new(Shared::new(threads));
        let mut pool = Pool { shared, workers: Vec::new(), turn: Mutex::new(()) };
        for i in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = std::thread::Builder::new().name(format!("forebay-{i}"));
            pool.workers.push(worker.spawn(move || shared.work(i))?);
        }
        Ok(pool)
    }

    /// The number of threads, including the caller's.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task` with every number below `tasks`, each once, on any thread; returns when all are done.
    ///
    /// # Panics
    /// If a task panics, with its panic, after the other tasks have ended.
    pub fn run(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        if tasks <= 1 || self.workers.is_empty() {
            (0..tasks).for_each(task);
            return;
        }
        let turn = lock(&self.turn);
        let task: &(dyn Fn(usize) + Sync) = &task;
        // SAFETY: only the lifetime changes. `close` below returns when no worker uses the task any more,
        // and it runs before this function ends, in a panic too.
        let task: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(task) };
        self.shared.open(task, tasks);
        let mine = catch_unwind(AssertUnwindSafe(|| self.shared.take_tasks(0, task, tasks)));
        let theirs = self.shared.close();
        drop(turn);
        if let Some(panic) = mine.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    /// Divides matrices into pieces and calls `body` once with each piece, on any thread.
    pub fn for_tiles<T: Send>(
        &self,
        matrices: &mut [TileMut<'_, T>],
        grain: Grain,
        body: impl Fn(Piece, TileMut<'_, T>) + Sync,
    ) {
        let matrices = &*matrices;
        self.run(matrices.iter().map(|m| pieces(m, grain)).sum(), |mut task| {
            let mut matrix = 0;
            while task >= pieces(&matrices[matrix], grain) {
                task -= pieces(&matrices[matrix], grain);
                matrix += 1;
            }
            let whole = &matrices[matrix];
            let (rows, cols) = piece(whole, grain, task);
            // SAFETY: every task is a different cell of the grid, so parts do not overlap, and the
            // matrices are borrowed exclusively while the loop runs.
            let tile = unsafe { whole.part(rows.clone(), cols.clone()) };
            body(Piece { matrix, rows, cols }, tile);
        });
    }

    /// Divides two matrices into equally many pieces. Calls `body` once with the index of each piece and the pieces of
    /// both matrices, on any thread.
    pub fn for_tile_pairs<T: Send>(
        &self,
        matrices: [TileMut<'_, T>; 2],
        grains: [Grain; 2],
        body: impl Fn(usize, [TileMut<'_, T>; 2]) + Sync,
    ) {
        let pieces = [0, 1].map(|i| pieces(&matrices[i], grains[i]));
        assert_eq!(pieces[0], pieces[1], "pieces of two matrices");
        self.run(pieces[0], |task| {
            let tiles = [0, 1].map(|i| {
                let (rows, cols) = piece(&matrices[i], grains[i], task);
                // SAFETY: every task is a different cell of the grid, so parts do not overlap, and the
                // matrices are this loop's own.
                unsafe { matrices[i].part(rows, cols) }
            });
            body(task, tiles);
        });
    }

    /// Calls `body` with every row of `data` once, on any thread.
    pub fn for_rows<T: Send>(&self, data: &mut [T], width: usize, body: impl Fn(usize, &mut [T]) + Sync) {
        let grain = Grain { rows: 1, cols: width };
        self.for_tiles(&mut [TileMut::new(data, width)], grain, |piece, mut tile| {
            body(piece.rows.start, tile.row(0));
        });
    }
}

/// The number of pieces of a matrix.
fn pieces<T>(matrix: &TileMut<'_, T>, grain: Grain) -> usize {
    matrix.rows().div_ceil(grain.rows) * matrix.cols().div_ceil(grain.cols)
}

/// The rows and columns of a piece.
fn piece<T>(matrix: &TileMut<'_, T>, grain: Grain, number: usize) -> (Range<usize>, Range<usize>) {
    let across = matrix.cols().div_ceil(grain.cols);
    let (row, col) = (number / across * grain.rows, number % across * grain.cols);
    (row..matrix.rows().min(row + grain.rows), col..matrix.cols().min(col + grain.cols))
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.wake();
        for worker in self.workers.drain(..) {
            // The caller of `run` has received a worker's panic already.
            let _ = worker.join();
        }
    }
}

type Task = &'static (dyn Fn(usize) + Sync);

/// The state that the caller and the workers share.
///
/// A loop is open while `open` is true. A worker first increments `inside` and then reads `open`. The caller first
/// clears `open` and then waits until `inside` is zero. So either the worker sees that the loop is over, or the caller
/// waits for the worker. A sleeping worker delays nothing.
struct Shared {
    /// Counts loops, so that a worker can tell a new loop from the one that it has finished.
    loops: AtomicUsize,
    open: AtomicBool,
    inside: AtomicUsize,
    job: UnsafeCell<Option<(Task, usize)>>,
    /// By thread: the next task of its part.
    next: Box<[Cursor]>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    bed: Mutex<()>,
    alarm: Condvar,
}

/// On its own cache line (two, because CPUs fetch pairs), because usually only one thread writes to it.
#[repr(align(128))]
struct Cursor(AtomicUsize);

// SAFETY: `job` is written only while no loop is open and no worker is inside, and read only by workers
// inside an open loop; the atomics order the two.
unsafe impl Sync for Shared {}

impl Shared {
    fn new(threads: usize) -> Shared {
        Shared {
            loops: AtomicUsize::new(0),
            open: AtomicBool::new(false),
            inside: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            next: (0..threads).map(|_| Cursor(AtomicUsize::new(0))).collect(),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            bed: Mutex::new(()),
            alarm: Condvar::new(),
        }
    }

    /// Publishes a loop. The caller holds `turn`.
    fn open(&self, task: Task, tasks: usize) {
        // SAFETY: the last `close` saw no worker inside, and none reads the job before `open` is set.
        unsafe { *self.job.get() = Some((task, tasks)) };
        for (thread, next) in self.next.iter().enumerate() {
            next.0.store(self.share(thread, tasks).start, SeqCst);
        }
        self.open.store(true, SeqCst);
        self.loops.fetch_add(1, SeqCst);
        if self.sleepers.load(SeqCst) > 0 {
            self.wake();
        }
    }

    /// Ends a loop and waits until no worker is inside. Returns a worker's panic.
    fn close(&self) -> Option<Box<dyn Any + Send>> {
        self.open.store(false, SeqCst);
        let mut turns = 0u32;
        while self.inside.load(SeqCst) > 0 {
            turns += 1;
            // A worker that was descheduled may need this CPU.
            if turns > 1000 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        lock(&self.panic).take()
    }

    /// A thread's part of the tasks.
    fn share(&self, thread: usize, tasks: usize) -> Range<usize> {
        let threads = self.next.len();
        thread * tasks / threads..(thread + 1) * tasks / threads
    }

    /// Runs a thread's own part from first to last, because neighbouring tasks are neighbours in memory. Then runs what
    /// other threads have left.
    fn take_tasks(&self, thread: usize, task: Task, tasks: usize) {
        let threads = self.next.len();
        for whose in (thread..threads).chain(0..thread) {
            let end = self.share(whose, tasks).end;
            loop {
                let i = self.next[whose].0.fetch_add(1, SeqCst);
                if i >= end {
                    break;
                }
                task(i);
            }
        }
    }

    /// The main function of a worker.
    fn work(&self, thread: usize) {
        let mut seen = 0;
        while let Some(current) = self.next_loop(seen) {
            seen = current;
            self.inside.fetch_add(1, SeqCst);
            if self.open.load(SeqCst) {
                // SAFETY: this worker is counted inside and the loop is open, so the job is not written.
                let job = unsafe { *self.job.get() };
                let (task, tasks) = job.expect("an open loop has a job");
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.take_tasks(thread, task, tasks))) {
                    // Stops further tasks. The caller receives the panic.
                    self.next.iter().for_each(|next| next.0.store(tasks, SeqCst));
                    lock(&self.panic).get_or_insert(panic);
                }
            }
            self.inside.fetch_sub(1, SeqCst);
        }
    }

    /// Waits for a loop after `seen`, first spinning, then asleep. `None` when the pool ends.
    fn next_loop(&self, seen: usize) -> Option<usize> {
        let news = || {
            let current = self.loops.load(SeqCst);
            (current != seen || self.stop.load(SeqCst)).then_some(current)
        };
        let start = Instant::now();
        let current = loop {
            if let Some(current) = news() {
                break current;
            }
            if start.elapsed() < WATCH {
                (0..16).for_each(|_| std::hint::spin_loop());
                continue;
            }
            let mut bed = lock(&self.bed);
            self.sleepers.fetch_add(1, SeqCst);
            while news().is_none() {
                bed = self.alarm.wait(bed).unwrap_or_else(PoisonError::into_inner);
            }
            self.sleepers.fetch_sub(1, SeqCst);
        };
        (!self.stop.load(SeqCst)).then_some(current)
    }

    fn wake(&self) {
        // A worker that is about to sleep holds the lock until it sleeps.
        let _bed = lock(&self.bed);
        self.alarm.notify_all();
    }
}

/// Locks even after a panic: the data under these locks is valid at every moment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in 1..5 {
            let pool = Pool::new(threads).unwrap();
            for tasks in [0, 1, 2, 7, 100] {
                let counts: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, |i| {
                    counts[i].fetch_add(1, SeqCst);
                });
                assert!(counts.iter().all(|c| c.load(SeqCst) == 1));
            }
        }
    }

    #[test]
    fn pieces_cover_every_matrix_exactly_once() {
        let pool = Pool::new(3).unwrap();
        let mut a = vec![0u32; 5 * 7];
        let mut b = vec![0u32; 3 * 4];
        let mut matrices = [TileMut::new(&mut a, 7), TileMut::new(&mut b, 4)];
        pool.for_tiles(&mut matrices, Grain { rows: 2, cols: 3 }, |piece, mut tile| {
            for (i, row) in piece.rows.clone().enumerate() {
                for (j, col) in piece.cols.clone().enumerate() {
                    tile.row(i)[j] += 1 + (piece.matrix * 1000 + row * 10 + col) as u32;
                }
            }
        });
        assert!((0..35).all(|i| a[i] as usize == 1 + i / 7 * 10 + i % 7));
        assert!((0..12).all(|i| b[i] as usize == 1001 + i / 4 * 10 + i % 4));
    }

    #[test]
    fn pieces_of_two_matrices_come_together() {
        let pool = Pool::new(3).unwrap();
        // The first is cut into columns, the second into rows.
        let (mut a, mut b) = (vec![0; 2 * 7], vec![0; 4 * 3]);
        let matrices = [TileMut::new(&mut a, 7), TileMut::new(&mut b, 3)];
        let grains = [Grain { rows: 2, cols: 2 }, Grain { rows: 1, cols: 3 }];
        pool.for_tile_pairs(matrices, grains, |piece, mut tiles| {
            for tile in &mut tiles {
                for row in 0..tile.rows() {
                    tile.row(row).iter_mut().for_each(|x| *x += piece + 1);
                }
            }
        });
        assert_eq!(a, [1, 1, 2, 2, 3, 3, 4, 1, 1, 2, 2, 3, 3, 4]);
        assert_eq!(b, [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3).unwrap();
        for guilty in 0..8 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(8, |i| assert!(i != guilty, "task {i}"));
            }));
            assert!(result.is_err());
        }
        let sum = AtomicUsize::new(0);
        pool.run(10, |i| {
            sum.fetch_add(i, SeqCst);
        });
        assert_eq!(sum.into_inner(), 45);
    }

    #[test]
    fn sleeping_workers_wake_up_again() {
        let pool = Pool::new(2).unwrap();
        for _ in 0..20 {
            std::thread::sleep(WATCH * 3);
            let sum = AtomicUsize::new(0);
            pool.run(4, |i| {
                sum.fetch_add(i, SeqCst);
            });
            assert_eq!(sum.into_inner(), 6);
        }
    }
}
