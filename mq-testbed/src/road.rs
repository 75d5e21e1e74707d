//! A proxy as the conformance suite's [`Line`]: the faults that a connection to a real server meets.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mq_conformance::{Hook, Lacking, Line};

use crate::proxy::{Direction, Proxy, Trouble};

/// Proxies that are used again: where a broker names the addresses to connect to, each needs a listener of its own.
#[derive(Clone, Default)]
pub struct Doors(Arc<Mutex<Vec<Proxy>>>);

impl Doors {
    /// A row of proxies.
    #[must_use]
    pub fn new(proxies: Vec<Proxy>) -> Self {
        Self(Arc::new(Mutex::new(proxies)))
    }

    /// Takes one, which comes back when the road is dropped; `None` when all are in use.
    #[must_use]
    pub fn open(&self) -> Option<Road> {
        let proxy = self.row().pop()?;
        Some(Road {
            port: proxy.port(),
            back: Some(self.clone()),
            way: Mutex::new(Way { proxy: Some(proxy), trouble: None }),
        })
    }

    fn row(&self) -> MutexGuard<'_, Vec<Proxy>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The road of one connection to a server on this machine.
pub struct Road {
    port: u16,
    back: Option<Doors>,
    way: Mutex<Way>,
}

struct Way {
    /// Gone only while the road is dropped.
    proxy: Option<Proxy>,
    trouble: Option<Trouble>,
}

impl Way {
    /// Ends the present trouble and begins another. One that met no traffic is fine here: the suite looks at the effect.
    fn turn(&mut self, trouble: Option<Trouble>) -> Hook {
        let Some(proxy) = &mut self.proxy else { return Ok(()) };
        if let Some(before) = self.trouble.take() {
            let _ = proxy.end(before);
        }
        if let Some(trouble) = trouble {
            proxy.begin(trouble).map_err(|_| Lacking("a proxy that does what it is told"))?;
            self.trouble = (trouble != Trouble::Cut).then_some(trouble);
        }
        Ok(())
    }
}

impl Road {
    /// A road to that port of 127.0.0.1.
    ///
    /// # Errors
    /// When no port is free.
    pub fn to(port: u16) -> crate::Result<Self> {
        let proxy = Proxy::before(port, 1)?;
        Ok(Self { port: proxy.port(), back: None, way: Mutex::new(Way { proxy: Some(proxy), trouble: None }) })
    }

    /// The port that the connection goes to.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    fn way(&self) -> MutexGuard<'_, Way> {
        self.way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The roads of one client to several nodes, which meet the same faults together.
pub struct Roads(pub Vec<Road>);

impl Roads {
    fn all(&self, act: impl Fn(&Road) -> Hook) -> Hook {
        self.0.iter().try_for_each(act)
    }
}

impl Line for Roads {
    fn crash(&self) -> Hook {
        self.all(Line::crash)
    }

    fn cut(&self) -> Hook {
        self.all(Line::cut)
    }

    fn reachable(&self, yes: bool) -> Hook {
        self.all(|road| road.reachable(yes))
    }

    fn hold_answers(&self, hold: bool) -> Hook {
        self.all(|road| road.hold_answers(hold))
    }

    fn freeze(&self, frozen: bool) -> Hook {
        self.all(|road| road.freeze(frozen))
    }

    fn open(&self) -> usize {
        self.0.iter().map(Line::open).sum()
    }
}

impl Drop for Road {
    fn drop(&mut self) {
        let Some(doors) = self.back.take() else { return };
        let mut way = self.way();
        // What is in the way ends, and what is still open is closed, before another takes the door.
        let _ = way.turn(None);
        let _ = way.turn(Some(Trouble::Cut));
        doors.row().extend(way.proxy.take());
    }
}

impl Line for Road {
    fn crash(&self) -> Hook {
        // The sockets are reset and no new ones come: all that a server sees of a death.
        self.way().turn(Some(Trouble::Refuse))
    }

    fn cut(&self) -> Hook {
        self.way().turn(Some(Trouble::Cut))
    }

    fn reachable(&self, yes: bool) -> Hook {
        self.way().turn((!yes).then_some(Trouble::Refuse))
    }

    fn hold_answers(&self, hold: bool) -> Hook {
        self.way().turn(hold.then_some(Trouble::Stall(Direction::ToClient)))
    }

    fn freeze(&self, frozen: bool) -> Hook {
        self.way().turn(frozen.then_some(Trouble::Stall(Direction::Both)))
    }

    fn open(&self) -> usize {
        self.way().proxy.as_ref().map_or(0, Proxy::live)
    }
}
