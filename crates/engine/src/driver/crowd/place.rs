//! Finds how much of a request's prompt is computed already.
//!
//! A prefix of the prompt may be in the prefix cache, in memory or on disk, or in a running request's session. If an
//! earlier request is still computing a prompt with the same beginning, waiting for it may save work.

use std::cmp::Reverse;
use std::time::Duration;

use super::Crowd;
use super::member::{Member, Start};
use crate::TokenId;
use crate::driver::prefix::{Match, WORTH_FORKING, common};
use crate::session::Session;
use crate::tokenizer::Tokenizer;

/// Waiting for another prompt must save at least this many tokens.
const WORTH_WAITING: usize = 32;

/// A position where prompts differ gets a mark if the nearest mark is at least this far before it.
const FAR: usize = 16;

/// How many tokens of differing texts the log shows.
const SHOWN: usize = 8;

impl Crowd {
    /// Decides how a request starts that has nothing computed yet.
    pub(super) fn place(&mut self, mut member: Member) {
        let (text, tenant) = (&member.text, member.client.tenant);
        let last = text.len() - 1;
        let kept = self.prefixes.as_ref().and_then(|prefixes| prefixes.find(tenant, text));
        let stored =
            self.prefixes.as_ref().filter(|_| member.may_read).and_then(|p| p.find_on_disk(tenant, text));
        let of_tenant = self.active.iter().enumerate().filter(|(_, other)| other.client.tenant == tenant);
        let beside = Match::best(of_tenant.map(|(index, other)| {
            let same = common(&other.text, text);
            let reach = other.session.reach(same.min(last));
            Match { index, same, reach: if reach >= WORTH_FORKING { reach } else { 0 } }
        }));
        let leader = self.leader(&member);

        let reach = |found: Option<Match>| found.map_or(0, |found| found.reach);
        let in_memory = reach(kept).max(reach(beside));
        let from_disk = stored.filter(|stored| {
            let prefixes = self.prefixes.as_ref();
            prefixes.is_some_and(|p| p.is_worth_reading(stored.reach.saturating_sub(in_memory)))
        });
        let ready = in_memory.max(reach(from_disk));
        let from_leader = leader.filter(|leader| leader.reach >= ready + WORTH_WAITING);

        let closest = {
            let tokens = |found: Option<Match>, of: &dyn Fn(usize) -> Vec<TokenId>| {
                found.map(|found| (found.same, of(found.index)))
            };
            let prefixes = self.prefixes.as_ref();
            let in_kept = tokens(kept, &|i| prefixes.map_or(Vec::new(), |p| p.tokens(i).to_vec()));
            let in_stored =
                tokens(stored, &|i| prefixes.map_or(Vec::new(), |p| p.tokens_on_disk(i).to_vec()));
            let in_beside = tokens(beside, &|i| self.active[i].text.clone());
            [in_kept, in_stored, in_beside].into_iter().flatten().max_by_key(|(same, _)| *same)
        };
        let start = reach(from_leader).max(ready);
        let whence = match (from_leader, from_disk) {
            _ if start == 0 => "",
            (Some(_), _) => " from a prompt that is being read",
            (None, Some(_)) => " from disk",
            (None, None) => " from memory",
        };
        let parting = closest.as_ref().map_or_else(String::new, |(same, other)| {
            format!("; it {}", parting_words(text.len(), other.len(), *same))
        });
        tracing::info!("prompt of {} tokens: {start} reused{whence}{parting}", text.len());
        if let Some((same, other)) = &closest {
            let tokenizer = self.engine.tokenizer();
            // The log shows users' texts only at level `debug`.
            tracing::debug!(
                "{:?} instead of {:?}",
                shown(tokenizer, text, *same),
                shown(tokenizer, other, *same)
            );
        }

        // Later prompts may differ at the same position.
        let parted = closest.map_or(0, |(same, _)| same.min(last));
        if parted >= start + FAR {
            member.pin(parted);
        }
        if let Some(leader) = from_leader {
            let other = &mut self.active[leader.index];
            other.pin(leader.reach);
            member.start = Start::After { number: other.number, at: leader.reach };
        } else if let Some(ticket) = from_disk.and_then(|stored| self.prefixes.as_mut()?.read(stored.index)) {
            member.start = Start::Reading { ticket, reach: reach(from_disk) };
        } else {
            let session = match (kept, beside, &mut self.prefixes) {
                (Some(kept), _, Some(prefixes)) if kept.reach > 0 && kept.reach >= reach(beside) => {
                    Some(prefixes.take(kept))
                }
                (_, Some(beside), _) if beside.reach > 0 => self.active[beside.index].fork(beside.reach),
                _ => None,
            };
            self.begin(&mut member, session);
        }
        self.active.push(member);
    }

    /// Among earlier requests of the same tenant, the one whose prompt shares the longest beginning with this
    /// request's, beyond what is computed of it.
    ///
    /// A request waits only for earlier ones, so requests never wait for each other in a circle: the last one of a
    /// chain computes its prompt, or waits for a file. This holds whatever happens to other requests. A request whose
    /// leader disappears is placed again by the same rule.
    fn leader(&self, member: &Member) -> Option<Match> {
        let text = &member.text;
        let may_lead =
            |other: &Member| other.number < member.number && other.client.tenant == member.client.tenant;
        let earlier = self.active.iter().enumerate().filter(|(_, other)| may_lead(other));
        let reading = earlier.filter_map(|(index, other)| {
            let same = common(&other.text[..other.prompt], text).min(text.len() - 1);
            (same > other.session.tokens().len()).then_some(Match { index, same, reach: same })
        });
        reading.max_by_key(|found| (found.reach, Reverse(self.active[found.index].number)))
    }

    /// Starts requests whose file has been read. Waits up to this long for one.
    pub(super) fn take_files(&mut self, wait: Duration) {
        let Some(prefixes) = &mut self.prefixes else { return };
        prefixes.tend();
        for (ticket, session) in prefixes.arrived(wait) {
            let waits =
                |member: &Member| matches!(member.start, Start::Reading { ticket: t, .. } if t == ticket);
            let Some(i) = self.active.iter().position(waits) else { continue };
            let mut member = self.active.remove(i);
            let Start::Reading { reach, .. } = member.start else { unreachable!("it was found by that") };
            match session {
                Some(mut session) => {
                    session.go_back(session.reach(reach));
                    self.begin(&mut member, Some(session));
                    self.active.push(member);
                }
                None => {
                    member.may_read = false;
                    self.place(member);
                }
            }
        }
    }

    /// Starts requests whose leader has computed enough of its prompt.
    pub(super) fn follow(&mut self) {
        let followers: Vec<(u64, u64, usize)> = self
            .active
            .iter()
            .filter_map(|member| match member.start {
                Start::After { number, at } => Some((member.number, number, at)),
                _ => None,
            })
            .collect();
        for (follower, leader, at) in followers {
            let index = |number| self.active.iter().position(|member| member.number == number);
            let (Some(i), leader) = (index(follower), index(leader)) else { continue };
            match leader.map(|leader| &mut self.active[leader]) {
                None => {
                    let member = self.active.remove(i);
                    self.place(member);
                }
                Some(leader) if leader.session.tokens().len() >= at => {
                    let session = leader.fork(leader.session.reach(at));
                    let mut member = self.active.remove(i);
                    self.begin(&mut member, session);
                    self.active.push(member);
                }
                Some(_) => {}
            }
        }
    }

    /// Starts computing after the tokens of a session.
    fn begin(&mut self, member: &mut Member, session: Option<Session>) {
        let reused = member.begin(session);
        if let (Some(reused), Some(prefixes)) = (reused, &mut self.prefixes) {
            prefixes.count(reused);
        }
    }
}

/// Describes where a text differs from the closest other one, for the log.
fn parting_words(text: usize, other: usize, same: usize) -> String {
    if same == other {
        format!("continues the closest conversation after its {same} tokens")
    } else if same == text {
        format!("is the beginning of the closest conversation, of {other} tokens")
    } else {
        format!("differs from the closest conversation at token {same}")
    }
}

/// Some text after a number of tokens, for the log.
fn shown(tokenizer: &Tokenizer, tokens: &[TokenId], after: usize) -> String {
    let rest = &tokens[after..];
    tokenizer.decode(&rest[..rest.len().min(SHOWN)], true)
}
