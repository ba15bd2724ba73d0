// The page's side of LogView: puts windows of numbered lines together and shows them under one tab per rank.

const KEEP = 2000; // lines kept in the page

export default () => {
  let first = 0; // number of the oldest line kept
  let lines = []; // [rank, text], for all views of this model
  const views = new Set();

  const take = ({ at, lines: more }) => {
    const end = first + lines.length;
    let fresh = more.slice(Math.max(0, end - at));
    if (at > end && lines.length) fresh = [[null, `… ${at - end} lines left out; run.logs() has them`], ...more];
    lines.push(...fresh);
    first = at + more.length - lines.length;
    if (lines.length > KEEP) first += lines.splice(0, lines.length - KEEP).length;
    for (const show of views) show(fresh);
  };

  return {
    initialize({ model }) {
      const changed = () => take(model.get("window"));
      changed();
      model.on("change:window", changed);
      return () => model.off("change:window", changed);
    },

    render({ model, el }) {
      const make = (name, attributes, parent) => {
        const node = document.createElement(name);
        for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
        return parent.appendChild(node);
      };
      const panelId = `wb-log-${Math.random().toString(36).slice(2)}`;
      let chosen = null; // null: all ranks
      const bar = make("div", { role: "tablist", "aria-label": "output of the ranks", class: "wb-tabs" }, el);
      const pre = make("pre", { id: panelId, role: "tabpanel", tabindex: "0", class: "wb-lines" }, el);
      const news = make("div", { role: "status", class: "wb-news" }, el);

      const append = (fresh) => {
        const atEnd = pre.scrollHeight - pre.scrollTop - pre.clientHeight < 24;
        for (const [rank, text] of fresh) {
          if (chosen !== null && rank !== null && rank !== chosen) continue;
          const line = make("span", { class: rank === null ? "wb-gap" : "wb-line" }, pre);
          if (chosen === null && rank !== null) make("span", { class: "wb-of" }, line).textContent = `[${rank}] `;
          line.append(`${text}\n`);
        }
        while (pre.childElementCount > KEEP) pre.firstChild.remove();
        if (atEnd) pre.scrollTop = pre.scrollHeight;
      };

      const choose = (rank, focus) => {
        chosen = rank;
        for (const tab of bar.children) {
          const on = tab.dataset.rank === String(rank);
          tab.setAttribute("aria-selected", on);
          tab.tabIndex = on ? 0 : -1;
          if (on && focus) tab.focus();
          if (on) pre.setAttribute("aria-label", tab.textContent);
        }
        pre.replaceChildren();
        append(lines);
        pre.scrollTop = pre.scrollHeight;
      };

      const tabs = () => {
        const failed = model.get("failed");
        bar.replaceChildren();
        for (const rank of [null, ...model.get("ranks")]) {
          const tab = make("button", { role: "tab", type: "button", "aria-controls": panelId, "data-rank": String(rank) }, bar);
          tab.textContent = rank === null ? "all ranks" : `rank ${rank}${rank === failed ? " ✘ failed first" : ""}`;
          tab.classList.toggle("wb-is-failed", rank === failed && rank !== null);
          tab.onclick = () => choose(rank, false);
        }
        choose(chosen, false);
      };

      bar.onkeydown = (event) => {
        const all = [...bar.children];
        const here = all.indexOf(event.target);
        const to = { ArrowRight: here + 1, ArrowLeft: here - 1 + all.length, Home: 0, End: all.length - 1 }[event.key];
        if (to === undefined || here < 0) return;
        event.preventDefault();
        event.stopPropagation(); // the notebook has its own use for these keys
        const value = all[to % all.length].dataset.rank;
        choose(value === "null" ? null : Number(value), true);
      };
      const tell = () => (news.textContent = model.get("news"));
      tabs();
      views.add(append);
      model.on("change:ranks change:failed", tabs);
      model.on("change:news", tell);
      return () => {
        views.delete(append);
        model.off("change:ranks change:failed", tabs);
        model.off("change:news", tell);
      };
    },
  };
};
