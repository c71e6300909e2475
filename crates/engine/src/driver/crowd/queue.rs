//! Requests that wait for a place, and whose turn it is.

use std::collections::{BTreeMap, VecDeque};

use super::member::{Asked, Member};
use crate::blocks::Cancel;

/// A request that waits for a place.
pub enum Waiting {
    New(Box<Asked>),
    /// Had to make room for others. Its text so far is not lost, only what was computed of it.
    Parked(Box<Member>),
}

impl Waiting {
    fn cancel(&self) -> &Cancel {
        match self {
            Waiting::New(asked) => &asked.cancel,
            Waiting::Parked(member) => &member.cancel,
        }
    }

    fn number(&self) -> u64 {
        match self {
            Waiting::New(asked) => asked.number,
            Waiting::Parked(member) => member.number,
        }
    }

    fn client(&self) -> u128 {
        match self {
            Waiting::New(asked) => asked.request.client.number,
            Waiting::Parked(member) => member.client.number,
        }
    }
}

/// Requests that wait: a line for each client, in the order in which they came. No line is empty.
#[derive(Default)]
pub struct Queue(BTreeMap<u128, VecDeque<Waiting>>);

impl Queue {
    pub fn len(&self) -> usize {
        self.0.values().map(VecDeque::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a request to its client's line, before those that came later.
    pub fn insert(&mut self, waiting: Waiting) {
        let line = self.0.entry(waiting.client()).or_default();
        let place = line.partition_point(|other| other.number() < waiting.number());
        line.insert(place, waiting);
    }

    /// Takes out the request whose turn it is: one of the client that has the fewest places, `share` not yet; of several
    /// such clients, the one whose request came first.
    pub fn next(&mut self, places: impl Fn(u128) -> usize, share: usize) -> Option<Waiting> {
        let lines = self.0.iter().map(|(&client, line)| (places(client), line[0].number(), client));
        let (_, _, client) = lines.filter(|(held, ..)| *held < share).min()?;
        let line = self.0.get_mut(&client)?;
        let next = line.pop_front();
        if line.is_empty() {
            self.0.remove(&client);
        }
        next
    }

    /// Takes out the requests that are cancelled.
    pub fn take_cancelled(&mut self) -> Vec<Waiting> {
        let mut cancelled = Vec::new();
        for line in self.0.values_mut() {
            while let Some(i) = line.iter().position(|waiting| waiting.cancel().is_cancelled()) {
                cancelled.extend(line.remove(i));
            }
        }
        self.0.retain(|_, line| !line.is_empty());
        cancelled
    }

    /// Takes out all of them.
    pub fn take_all(&mut self) -> Vec<Waiting> {
        std::mem::take(&mut self.0).into_values().flatten().collect()
    }
}
