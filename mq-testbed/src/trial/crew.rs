//! The client processes of a trial.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::client::{Order, Role};
use crate::{Launch, Problem, Process, Result, trial};

/// Generous: a close may first have to wait for a confirmation.
const END: Duration = Duration::from_secs(60);

pub(super) struct Crew {
    client: trial::Client,
    order: Order,
    folder: PathBuf,
    pub(super) producers: Vec<Process>,
    pub(super) members: Vec<Process>,
    started: u32,
}

impl Crew {
    pub(super) fn new(client: &trial::Client, load: trial::Load, url: String, topic: &str, folder: &Path) -> Self {
        let order = Order {
            role: Role::Prepare,
            url,
            topic: topic.into(),
            group: "billing".into(),
            name: "c".into(),
            history: folder.to_path_buf(),
            rate: load.rate,
            keys: load.keys,
            work: load.work,
            window: load.window,
            hands: load.hands,
        };
        Self {
            client: client.clone(),
            order,
            folder: folder.to_path_buf(),
            producers: Vec::new(),
            members: Vec::new(),
            started: 0,
        }
    }

    fn launch(&self, role: Role, name: &str) -> Launch {
        let order = Order { role, name: name.into(), ..self.order.clone() };
        let mut launch =
            Launch::new(&self.client.program, &self.folder).args(self.client.args.clone()).args(order.arguments());
        launch.log = self.folder.join(format!("{name}.log"));
        launch.piped = matches!(role, Role::Produce | Role::Consume);
        launch
    }

    pub(super) fn prepare(&self) -> Result<()> {
        self.launch(Role::Prepare, "prepare").run()
    }

    pub(super) fn inspect(&self) -> Result<()> {
        self.launch(Role::Inspect, "inspect").run()
    }

    pub(super) fn destroy(&self) -> Result<()> {
        self.launch(Role::Destroy, "destroy").run()
    }

    /// Starts two members and, once they are subscribed, two producers.
    pub(super) fn begin(&mut self, watch: &mut trial::Watch) -> Result<()> {
        self.add_member()?;
        self.add_member()?;
        let ready = watch.until("both members to be ready", Duration::from_secs(30), |tally| tally.ready >= 2);
        ready.map_err(|problem| Problem::new(format!("{problem}; m0 said: {}", self.members[0].said())))?;
        for name in ["p0", "p1"] {
            self.producers.push(self.launch(Role::Produce, name).spawn()?);
        }
        Ok(())
    }

    pub(super) fn add_member(&mut self) -> Result<()> {
        let name = format!("m{}", self.started);
        self.started += 1;
        self.members.push(self.launch(Role::Consume, &name).spawn()?);
        Ok(())
    }

    pub(super) fn stop_producers(&mut self) -> Result<()> {
        stop(std::mem::take(&mut self.producers), "producer")
    }

    pub(super) fn stop_members(&mut self) -> Result<()> {
        stop(std::mem::take(&mut self.members), "member")
    }
}

/// Asks all to end, then waits for each.
fn stop(mut processes: Vec<Process>, what: &str) -> Result<()> {
    for process in &mut processes {
        process.close_input();
    }
    for mut process in processes {
        if !process.await_end(END) {
            return Err(Problem::new(format!("a {what} did not end within {END:?} of its order: {}", process.said())));
        }
        if let Some(status) = process.ended()
            && !status.success()
        {
            return Err(Problem::new(format!("a {what} ended with {status}: {}", process.said())));
        }
    }
    Ok(())
}
