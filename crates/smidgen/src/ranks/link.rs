//! The control link between ranks: small messages over TCP, a star around rank 0.
//!
//! It opens before anything large is loaded, compares what the ranks were started with, carries small results, and
//! notices within ten seconds if a rank is lost. All ranks make the same calls in the same order, from their main
//! threads. A call that waits for a lost rank returns the same failure that the handler gets.
//! A rank that has finished sends a message, so the others do not take it for dead. A link that is dropped without
//! closing tells the others that this rank failed.
//! Left out: tensors (`smidgen_runtime::comm`).

use super::heartbeat::{OnLoss, Shared, Times};
use super::launch::Launch;
use super::rendezvous::{Listener, Member, connect, ranks_text};
use super::wire::{Call, Loss, Message, join, split};
use crate::failure::Failure;
use smidgen_runtime::comm::Progress;
use std::sync::Arc;
use std::time::Duration;

/// The connection of this rank to the others.
#[derive(Debug)]
pub struct Link {
    shared: Arc<Shared>,
    size: usize,
    calls: u64,
}

impl Link {
    /// Opens the link at the address that the launcher gave. Returns when all ranks are connected.
    pub fn open(launch: &Launch, times: Times, on_loss: OnLoss) -> Result<Link, Failure> {
        let Some(master) = &launch.master else {
            return Err(Failure::command("the ranks are on several machines, and `MASTER_ADDR` is not set").hint(
                "set `MASTER_ADDR` to the machine of rank 0, and `MASTER_PORT` to a free port there, for all ranks",
            ));
        };
        let member = Member { rank: launch.rank, size: launch.size, job: launch.job.clone() };
        match launch.rank {
            0 => Link::serve(Listener::bind(master)?, &member, times, on_loss),
            _ => {
                let place = if master.host.contains(':') {
                    format!("[{}]:{}", master.host.trim_matches(['[', ']']), master.port)
                } else {
                    format!("{}:{}", master.host, master.port)
                };
                Link::reach(&place, Some(master.named_by), &member, times, on_loss)
            }
        }
    }

    /// Rank 0: waits for the others to connect.
    pub fn serve(
        listener: Listener,
        member: &Member,
        times: Times,
        on_loss: OnLoss,
    ) -> Result<Link, Failure> {
        let connections = listener.accept(member, times)?;
        Link::start(member, connections, times, on_loss)
    }

    /// Other ranks: connects to the address that [`Listener::anywhere`] returned to rank 0.
    pub fn connect(address: &str, member: &Member, times: Times, on_loss: OnLoss) -> Result<Link, Failure> {
        let Some((job, places)) = address.split_once('@') else {
            return Err(Failure::ranks(format!("`{address}` is not an address of rank 0")));
        };
        let member = Member { job: job.to_owned(), ..member.clone() };
        Link::reach(places, None, &member, times, on_loss)
    }

    fn reach(
        places: &str,
        named_by: Option<&'static str>,
        member: &Member,
        times: Times,
        on_loss: OnLoss,
    ) -> Result<Link, Failure> {
        let stream = connect(places, named_by, member, times)?;
        Link::start(member, vec![(0, stream)], times, on_loss)
    }

    fn start(
        member: &Member,
        connections: Vec<(usize, std::net::TcpStream)>,
        times: Times,
        on_loss: OnLoss,
    ) -> Result<Link, Failure> {
        let shared = Shared::start(member.rank, connections, times, on_loss);
        let shared = shared.map_err(|error| Failure::ranks(error).context("the link between ranks"))?;
        Ok(Link { shared, size: member.size, calls: 0 })
    }

    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// Sets what this rank is doing, such as `step 12`, for messages about a lost rank.
    pub fn set_place(&self, place: impl Into<String>) {
        self.shared.set_place(place.into());
    }

    /// Sets the hint for a lost rank, such as ``continue with `smidgen resume runs/x` ``.
    pub fn set_remedy(&self, remedy: impl Into<String>) {
        self.shared.set_remedy(remedy.into());
    }

    /// From now on, a rank that keeps the others waiting in tensor exchanges for longer than the limit is lost.
    pub fn watch(&self, progress: Arc<Progress>, limit: Duration) {
        self.shared.watch(progress, limit);
    }

    /// The first loss of a rank, if there was one.
    pub fn failure(&self) -> Option<Failure> {
        self.shared.failure()
    }

    /// Waits for a loss. For a rank whose collective failed, because the reason is most often that another rank is
    /// lost.
    pub fn failure_within(&self, time: Duration) -> Option<Failure> {
        self.shared.failure_within(time)
    }

    /// Gives every rank the bytes of all ranks, in the order of ranks.
    pub fn gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        self.calls += 1;
        let data = |bytes: Vec<u8>| Message::Data { call: Call::Gather, number: self.calls, bytes };
        let joined = if self.rank() == 0 {
            let mut parts = vec![bytes.to_vec()];
            for peer in 0..self.size - 1 {
                parts.push(self.shared.receive(peer, Call::Gather, self.calls)?);
            }
            let message = data(join(&parts));
            for peer in 0..self.size - 1 {
                self.shared.send(peer, &message)?;
            }
            return Ok(parts);
        } else {
            self.shared.send(0, &data(bytes.to_vec()))?;
            self.shared.receive(0, Call::Gather, self.calls)?
        };
        split(&joined)
            .filter(|parts| parts.len() == self.size)
            .ok_or_else(|| Failure::ranks("rank 0 sent something that is not a list of all ranks"))
    }

    /// Gives every rank the bytes of rank 0; those of other ranks are ignored.
    pub fn broadcast(&mut self, bytes: Vec<u8>) -> Result<Vec<u8>, Failure> {
        self.calls += 1;
        if self.rank() != 0 {
            return self.shared.receive(0, Call::Broadcast, self.calls);
        }
        let message = Message::Data { call: Call::Broadcast, number: self.calls, bytes };
        for peer in 0..self.size - 1 {
            self.shared.send(peer, &message)?;
        }
        let Message::Data { bytes, .. } = message else { unreachable!("it was created as `Data` above") };
        Ok(bytes)
    }

    /// Returns after every rank has called it.
    pub fn barrier(&mut self) -> Result<(), Failure> {
        self.gather(&[]).map(drop)
    }

    /// Compares values that must be the same on all ranks, each with a name. Every rank gets the same error.
    pub fn agree(&mut self, facts: &[(&str, String)]) -> Result<(), Failure> {
        let own: Vec<Vec<u8>> = facts
            .iter()
            .flat_map(|(name, value)| [name.as_bytes().to_vec(), value.as_bytes().to_vec()])
            .collect();
        let all = self.gather(&join(&own))?;
        let mut facts_of = Vec::new();
        for bytes in &all {
            let parts =
                split(bytes).ok_or_else(|| Failure::ranks("a rank sent facts that cannot be read"))?;
            let text = |part: &Vec<u8>| String::from_utf8_lossy(part).into_owned();
            facts_of
                .push(parts.chunks_exact(2).map(|pair| (text(&pair[0]), text(&pair[1]))).collect::<Vec<_>>());
        }
        let differences = differences(&facts_of);
        match differences.split_first() {
            None => Ok(()),
            Some((first, others)) => {
                let failure = Failure::ranks(format!("the ranks were started differently: {first}"));
                let failure = others.iter().fold(failure, Failure::detail);
                Err(failure.hint("every rank needs the same program, the same arguments and the same files"))
            }
        }
    }

    /// Tells all ranks that this one fails, and why. Their handlers are called, but not the handler of this rank.
    pub fn abort(self, reason: &str) {
        self.leave(reason);
    }

    /// Ends the link normally. Rank 0 waits for the others, which may leave before it.
    pub fn close(self) -> Result<(), Failure> {
        if let Some(failure) = self.shared.failure() {
            return Err(failure);
        }
        if self.rank() == 0 {
            let open = self.shared.wait_until_closed(self.shared.times.closing);
            if let Some(failure) = self.shared.failure() {
                return Err(failure);
            }
            if !open.is_empty() {
                let words = format!("{} did not end with the others", ranks_text(&open));
                self.leave(&words);
                return Err(Failure::ranks(words));
            }
            self.shared.end();
        } else {
            self.shared.end();
            self.shared.send_to_all(&Message::Close, None);
            self.shared.finish_sending();
            self.shared.wait_until_gone(self.shared.times.farewell);
        }
        self.shared.disconnect();
        Ok(())
    }

    /// Closes the connections without a message, like a process that dies.
    #[cfg(test)]
    pub(super) fn sever(&self) {
        self.shared.end();
        self.shared.disconnect();
    }

    fn leave(&self, reason: &str) {
        let has_failed = self.shared.failure().is_some();
        if self.shared.end() || has_failed {
            return;
        }
        let loss = Loss::Aborted(reason.to_owned());
        self.shared.send_to_all(&Message::Lost { rank: self.rank() as u32, loss }, None);
        self.shared.finish_sending();
        self.shared.wait_until_gone(self.shared.times.farewell);
        self.shared.disconnect();
    }
}

impl Drop for Link {
    /// A link that is dropped without `close` or `abort` belongs to a rank that failed.
    fn drop(&mut self) {
        self.leave(if std::thread::panicking() { "it panicked" } else { "it ended early" });
    }
}

/// A line for each value that is not the same on all ranks. The most frequent value counts as right; of several, the
/// one of the lowest rank.
fn differences(facts_of: &[Vec<(String, String)>]) -> Vec<String> {
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in facts_of.iter().flatten() {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let mut lines = Vec::new();
    for name in names {
        let value = |facts: &Vec<(String, String)>| {
            facts.iter().find(|(other, _)| other == name).map_or("nothing", |(_, value)| value).to_owned()
        };
        let values: Vec<String> = facts_of.iter().map(value).collect();
        let count = |value: &String| values.iter().filter(|other| *other == value).count();
        let most = values.iter().map(count).max().unwrap_or(0);
        let Some(usual) = values.iter().find(|value| count(value) == most) else { continue };
        let mut others: Vec<&String> = Vec::new();
        others.extend(values.iter().filter(|value| *value != usual));
        others.dedup();
        for other in others {
            let ranks: Vec<usize> = (0..values.len()).filter(|rank| values[*rank] == *other).collect();
            let line = format!("{} differs in the {name}: `{other}`, not `{usual}`", ranks_text(&ranks));
            let line = if ranks.len() > 1 { line.replace(" differs ", " differ ") } else { line };
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(of: &[&[(&str, &str)]]) -> Vec<Vec<(String, String)>> {
        let owned = |facts: &&[(&str, &str)]| {
            facts.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        of.iter().map(owned).collect()
    }

    #[test]
    fn differing_ranks_and_values_are_named() {
        let alike: &[(&str, &str)] = &[("recipe", "a"), ("data", "d")];
        assert_eq!(differences(&facts(&[alike, alike, alike])), Vec::<String>::new());
        let other: &[(&str, &str)] = &[("recipe", "b"), ("data", "d")];
        assert_eq!(differences(&facts(&[alike, other])), ["rank 1 differs in the recipe: `b`, not `a`"]);
        // The majority counts, even against rank 0.
        assert_eq!(
            differences(&facts(&[alike, other, other])),
            ["rank 0 differs in the recipe: `a`, not `b`"]
        );
        let less: &[(&str, &str)] = &[("recipe", "a")];
        assert_eq!(
            differences(&facts(&[alike, other, alike, alike, less, less])),
            [
                "rank 1 differs in the recipe: `b`, not `a`",
                "ranks 4, 5 differ in the data: `nothing`, not `d`"
            ]
        );
    }
}
