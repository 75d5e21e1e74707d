//! The faults, and the proof of each that it bit.

use std::fmt;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::crew::Crew;
use crate::proxy::{Direction, Proxy, Trouble};
use crate::{Problem, Process, Result, Server, until};

/// What is done to a running workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The line misbehaves for that long (a cut: once).
    Line(Trouble, Duration),
    /// `kill -9` of the server, which comes back at once.
    KillServer,
    /// A clean stop of the server, which is away for that long.
    StopServer(Duration),
    /// The server stands still for that long.
    FreezeServer(Duration),
    /// `kill -9` of a member; another one takes its place.
    KillMember,
    /// A member stands still for that long.
    FreezeMember(Duration),
    /// `kill -9` of a producer.
    KillProducer,
    /// The topic is emptied or deleted in the broker.
    Destroy,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(Trouble::Cut, _) => write!(f, "cut"),
            Self::Line(trouble, time) => write!(f, "{trouble}, {} s", time.as_secs()),
            Self::KillServer => write!(f, "kill -9 of the server"),
            Self::StopServer(time) => write!(f, "server away for {} s", time.as_secs()),
            Self::FreezeServer(time) => write!(f, "server frozen for {} s", time.as_secs()),
            Self::KillMember => write!(f, "kill -9 of a member"),
            Self::FreezeMember(time) => write!(f, "member frozen for {} s", time.as_secs()),
            Self::KillProducer => write!(f, "kill -9 of a producer"),
            Self::Destroy => write!(f, "topic destroyed"),
        }
    }
}

impl Fault {
    /// For every change: one of each sort that a broker's users meet.
    #[must_use]
    pub fn short() -> Vec<Self> {
        vec![
            Self::Line(Trouble::Cut, Duration::ZERO),
            Self::Line(Trouble::Swallow(Direction::Both), Duration::from_secs(3)),
            Self::Line(Trouble::CutAfter(Direction::ToClient, 3_000), Duration::from_secs(2)),
            Self::KillServer,
            Self::FreezeServer(Duration::from_secs(3)),
            Self::KillMember,
        ]
    }

    /// All of them.
    #[must_use]
    pub fn all() -> Vec<Self> {
        use Direction::{Both, ToClient, ToServer};
        let line = |trouble, seconds| Self::Line(trouble, Duration::from_secs(seconds));
        vec![
            line(Trouble::Cut, 0),
            line(Trouble::Refuse, 3),
            line(Trouble::Swallow(Both), 3),
            line(Trouble::Swallow(ToServer), 3),
            line(Trouble::Swallow(ToClient), 3),
            line(Trouble::Stall(Both), 3),
            line(Trouble::Stall(ToServer), 3),
            line(Trouble::Stall(ToClient), 3),
            line(Trouble::Delay(Both, Duration::from_millis(100)), 3),
            line(Trouble::Slow(Both, 20_000), 3),
            line(Trouble::CutAfter(ToServer, 3_000), 3),
            line(Trouble::CutAfter(ToClient, 3_000), 3),
            Self::KillServer,
            Self::StopServer(Duration::from_secs(3)),
            Self::FreezeServer(Duration::from_secs(3)),
            Self::KillMember,
            Self::FreezeMember(Duration::from_secs(5)),
            Self::KillProducer,
            Self::Destroy,
        ]
    }

    /// Whether it destroys messages that were confirmed.
    #[must_use]
    pub fn destroys(&self) -> bool {
        *self == Self::Destroy
    }

    /// Whether the server is away meanwhile, and then back.
    #[must_use]
    pub fn ends_the_server(&self) -> bool {
        matches!(self, Self::KillServer | Self::StopServer(_) | Self::FreezeServer(_))
    }

    /// A name for a folder.
    pub(super) fn slug(&self) -> String {
        let text = self.to_string();
        text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-")
    }

    /// Does it, from begin to end, and tells what it did.
    pub(super) fn strike(&self, server: &mut Server, proxy: &mut Proxy, crew: &mut Crew) -> Result<String> {
        match self {
            Self::Line(trouble, time) => line(proxy, *trouble, *time),
            Self::KillServer => {
                let old = server.kill()?;
                let new = server.restart()?;
                changed(old.pid, new.pid)?;
                Ok(format!("process {} killed, {} back after {:.1} s", old.pid, new.pid, new.ready_after.as_secs_f64()))
            }
            Self::StopServer(time) => {
                let begun = Instant::now();
                let old = server.stop()?;
                if server.answers() {
                    return Err(Problem::new("the stopped server answers"));
                }
                pass(begun, *time)?;
                let new = server.restart()?;
                changed(old.pid, new.pid)?;
                Ok(format!(
                    "process {} stopped, {} back after {:.1} s",
                    old.pid,
                    new.pid,
                    begun.elapsed().as_secs_f64()
                ))
            }
            Self::FreezeServer(time) => {
                let begun = Instant::now();
                server.freeze()?;
                let silent = !server.answers();
                pass(begun, *time)?;
                server.thaw()?;
                if !silent {
                    return Err(Problem::new("the frozen server answered"));
                }
                Ok(format!("silent for {:.1} s", begun.elapsed().as_secs_f64()))
            }
            Self::KillMember => {
                let mut member = crew.members.remove(0);
                let pid = member.pid();
                member.kill();
                crew.add_member()?;
                Ok(format!("process {pid} killed"))
            }
            Self::FreezeMember(time) => {
                let begun = Instant::now();
                let Some(member) = crew.members.first_mut() else { return Err(Problem::new("no member is there")) };
                let stopped = member.freeze();
                pass(begun, *time)?;
                member.signal(Signal::CONT);
                if !stopped {
                    return Err(Problem::new("the member did not stand still"));
                }
                Ok(format!("process {} stood still for {:.1} s", member.pid(), begun.elapsed().as_secs_f64()))
            }
            Self::KillProducer => {
                let mut producer = crew.producers.remove(0);
                let pid = producer.pid();
                producer.kill();
                Ok(format!("process {pid} killed"))
            }
            Self::Destroy => {
                // While nobody settles, what the producers send piles up: there is something to be destroyed.
                let begun = Instant::now();
                let stopped = crew.members.iter_mut().map(Process::freeze).fold(true, |all, one| all & one);
                pass(begun, PILE)?;
                let destroyed = crew.destroy();
                crew.members.iter_mut().for_each(|member| member.signal(Signal::CONT));
                destroyed?;
                if !stopped {
                    return Err(Problem::new("the members did not stand still before the topic was destroyed"));
                }
                Ok("topic destroyed".into())
            }
        }
    }
}

/// Two producers send some fifty messages in this time, and no member's session ends.
const PILE: Duration = Duration::from_millis(500);

/// Lets the time of a fault pass: the time itself is what is wanted here, there is no condition to wait for.
fn pass(begun: Instant, time: Duration) -> Result<()> {
    until("the fault's time to pass", time + Duration::from_secs(5), || (begun.elapsed() >= time).then_some(()))
}

fn changed(old: i32, new: i32) -> Result<()> {
    if old == new { Err(Problem::new(format!("the server is still process {old}"))) } else { Ok(()) }
}

fn line(proxy: &mut Proxy, trouble: Trouble, time: Duration) -> Result<String> {
    let begun = Instant::now();
    let open = proxy.live();
    if open == 0 {
        return Err(Problem::new("no connection goes through the proxy, so nothing on the line can be hurt"));
    }
    proxy.begin(trouble)?;
    pass(begun, time)?;
    // Longer if nothing met it yet, within reason.
    until("traffic to meet the fault", Duration::from_secs(10), || {
        (trouble == Trouble::Refuse || proxy.bite().cut > 0 || proxy.bite().bytes > 0).then_some(())
    })?;
    let bite = proxy.end(trouble)?;
    let mut parts = Vec::new();
    if bite.cut > 0 {
        parts.push(format!("{} connections reset, {open} had been open", bite.cut));
    }
    if bite.refused > 0 {
        parts.push("new ones refused".to_owned());
    }
    if bite.bytes > 0 {
        parts.push(format!("{} bytes met it", bite.bytes));
    }
    Ok(parts.join(", "))
}
