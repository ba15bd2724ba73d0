// The page's side of TraceView: draws the rectangles that the kernel makes for a window, and tells it where the reader looks.

const ROW = 17; // pixels of a row
const GAP = 10; // between two threads
const HEAD = 40; // the axis
const GUTTER = 150; // names of threads
const DOTS = 2; // pixels of the shortest piece of time that is asked for
const FAINT = 0.2; // opacity of what is not searched for
const LETTER = 6.1; // pixels of a letter, about

const words = (ns) => {
  const [scale, unit] = ns < 1e3 ? [1, "ns"] : ns < 1e6 ? [1e3, "µs"] : ns < 1e9 ? [1e6, "ms"] : [1e9, "s"];
  const value = ns / scale;
  return `${value >= 100 || unit === "ns" ? value.toFixed(0) : value.toPrecision(3)} ${unit}`;
};
const clip = (text, room) => (text.length <= room ? text : room < 4 ? "" : `${text.slice(0, room - 1)}…`);
const between = (value, low, high) => Math.min(Math.max(value, low), high);

export default {
  render({ model, el }) {
    const make = (name, attributes, parent) => {
      const node = document.createElement(name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      return parent.appendChild(node);
    };
    const bar = make("div", { class: "wb-moves", role: "toolbar", "aria-label": "where to look" }, el);
    const lanes = make("div", { class: "wb-lanes" }, el);
    const canvas = make("canvas", { tabindex: "0", role: "img", "data-lm-suppress-shortcuts": "true" }, lanes);
    const filler = make("div", { class: "wb-filler", "aria-hidden": "true" }, lanes);
    const tip = make("div", { class: "wb-tip", hidden: "" }, el);
    const hint = make("div", { class: "wb-what wb-keys" }, el);
    const brush = canvas.getContext("2d");

    let scene, tops, height; // what there is; where each row is drawn; pixels of all rows
    let view = { start: 0, end: 1 }; // nanoseconds that are shown
    let drawn = null; // rectangles
    let last = ""; // what was asked for last
    let pending = 0; // when; 0 = answered
    let again = false; // the view has moved meanwhile
    let hovered = null;
    let frame = 0;

    const width = () => canvas.clientWidth - GUTTER;
    const x = (time) => GUTTER + ((time - view.start) / (view.end - view.start)) * width();
    const timeAt = (place) => view.start + ((place - GUTTER) / width()) * (view.end - view.start);
    const rowAt = (place) => (place < HEAD ? -1 : tops.findIndex((top) => place + lanes.scrollTop >= top && place + lanes.scrollTop < top + ROW));

    const learn = () => {
      scene = model.get("scene");
      tops = [];
      height = HEAD;
      for (const strip of scene.strips) {
        strip.top = height + GAP / 2;
        for (let row = 0; row < strip.rows; row += 1) tops.push(strip.top + row * ROW);
        height += strip.rows * ROW + GAP;
      }
      filler.style.height = `${Math.max(0, height + 4 - canvas.clientHeight)}px`;
      lanes.style.height = `${Math.min(height + 4, 420)}px`;
    };

    const rowsSeen = () => {
      const [from, to] = [lanes.scrollTop + HEAD - ROW, lanes.scrollTop + lanes.clientHeight];
      const seen = tops.map((top, row) => (top > from && top < to ? row : -1)).filter((row) => row >= 0);
      return seen.length ? [seen[0], seen[seen.length - 1] + 1] : [0, tops.length];
    };

    // --- asking

    const ask = () => {
      if (pending && performance.now() - pending < 3000) {
        again = true;
        return;
      }
      const [first, rows] = rowsSeen();
      const window = { start: view.start, end: view.end, first, rows, dots: Math.max(50, Math.round(width() / DOTS)) };
      if (JSON.stringify(window) === last) return;
      last = JSON.stringify(window);
      again = false;
      pending = performance.now();
      model.set("window", window);
      model.save_changes();
    };

    const move = (start, end) => {
      const [low, high] = scene.span;
      const room = (high - low) * 0.02;
      const length = between(end - start, 20, high - low + 2 * room);
      const begin = between(start + (end - start - length) / 2, low - room, high + room - length);
      view = { start: begin, end: begin + length };
      redraw();
      ask();
    };
    const zoom = (factor, at = (view.start + view.end) / 2) => move(at - (at - view.start) * factor, at + (view.end - at) * factor);
    const pan = (share) => move(view.start + share * (view.end - view.start), view.end + share * (view.end - view.start));
    const fit = (span) => move(span[0] - (span[1] - span[0]) * 0.01, span[1] + (span[1] - span[0]) * 0.01);

    // --- drawing

    const redraw = () => {
      if (!frame) frame = requestAnimationFrame(draw);
    };

    const take = () => {
      const sent = model.get("tiles");
      const column = (name, Kind) => {
        const bytes = sent[name];
        return bytes ? new Kind(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength)) : new Kind();
      };
      drawn = { names: sent.names ?? [], origin: sent.origin ?? 0, choosing: sent.choosing };
      for (const name of ["start", "length", "busy", "lit"]) drawn[name] = column(name, Float64Array);
      for (const name of ["row", "count", "chosen", "name", "kind"]) drawn[name] = column(name, Int32Array);
      pending = 0;
      canvas.dataset.rectangles = drawn.start.length;
      canvas.dataset.chosen = drawn.chosen.reduce((sum, one) => sum + one, 0);
      redraw();
      if (again) ask();
    };

    const draw = () => {
      frame = 0;
      const dots = window.devicePixelRatio || 1;
      const [wide, high] = [canvas.clientWidth, canvas.clientHeight];
      if (!wide || !high) return;
      if (canvas.width !== Math.round(wide * dots) || canvas.height !== Math.round(high * dots)) {
        canvas.width = Math.round(wide * dots);
        canvas.height = Math.round(high * dots);
      }
      const style = getComputedStyle(el);
      const ink = { full: style.color, soft: style.getPropertyValue("--wb-soft") || style.color, rule: style.getPropertyValue("--wb-rule") };
      brush.setTransform(dots, 0, 0, dots, 0, 0);
      brush.clearRect(0, 0, wide, high);
      brush.font = `11px ${style.fontFamily}`;
      brush.textBaseline = "middle";
      drawSteps(ink, wide, high);
      brush.save();
      brush.beginPath();
      brush.rect(GUTTER, HEAD, wide - GUTTER, high - HEAD);
      brush.clip();
      if (drawn) drawTiles(ink, wide, high);
      drawMarked(ink);
      brush.restore();
      drawNames(ink, wide, high);
      drawAxis(ink, wide);
      canvas.dataset.start = view.start;
      canvas.dataset.end = view.end;
      canvas.setAttribute("aria-label", `threads and streams from ${words(Math.max(0, view.start))} to ${words(view.end)}`);
    };

    const drawSteps = (ink, wide, high) => {
      let free = -Infinity;
      brush.lineWidth = 1;
      const chosen = model.get("step");
      if (chosen.length) {
        const [from, to] = chosen.map((time) => between(x(time), GUTTER, wide));
        brush.globalAlpha = 0.4;
        brush.fillStyle = getComputedStyle(el).getPropertyValue("--wb-ground");
        brush.fillRect(from, 22, to - from, high);
        brush.globalAlpha = 1;
      }
      for (const [number, start, end] of scene.steps) {
        const [from, to] = [x(start), x(end)];
        if (to < GUTTER || from > wide || from - free < 4) continue;
        brush.strokeStyle = ink.rule;
        brush.beginPath();
        brush.moveTo(Math.max(from, GUTTER), 22);
        brush.lineTo(Math.max(from, GUTTER), high);
        brush.stroke();
        free = from;
        const text = `step ${number}`;
        const at = Math.max(from, GUTTER) + 4;
        if (Math.min(to, wide) - at < text.length * LETTER) continue;
        brush.fillStyle = ink.soft;
        brush.fillText(text, at, 30);
        free = at + text.length * LETTER + 6;
      }
    };

    const drawTiles = (ink, wide, high) => {
      const scale = width() / (view.end - view.start);
      const scroll = lanes.scrollTop;
      for (let i = 0; i < drawn.start.length; i += 1) {
        const top = tops[drawn.row[i]] - scroll;
        const from = GUTTER + (drawn.origin + drawn.start[i] - view.start) * scale;
        const length = drawn.length[i] * scale;
        if (from > wide || from + length < GUTTER || top > high || top < HEAD - ROW) continue;
        const color = scene.colors[drawn.kind[i]];
        const shown = Math.max(length > 3 ? length - 1 : length, 1);
        const dense = drawn.count[i] > 1 && drawn.length[i] ? between(drawn.busy[i] / drawn.length[i], 0.35, 1) : 1;
        const faint = drawn.choosing && !drawn.chosen[i];
        const part = drawn.choosing && drawn.chosen[i] && drawn.busy[i] ? between(drawn.lit[i] / drawn.busy[i], 0.3, 1) : 1;
        brush.fillStyle = color;
        brush.globalAlpha = dense * (faint ? FAINT : 1);
        if (part < 1) {
          brush.globalAlpha = dense * FAINT;
          brush.fillRect(from, top, shown, ROW - 2);
          brush.globalAlpha = dense;
        }
        brush.fillRect(from, top + (ROW - 2) * (1 - part), shown, (ROW - 2) * part);
        brush.globalAlpha = 1;
        if (drawn.count[i] === 1 && length > 26) {
          const begin = Math.max(from, GUTTER);
          brush.fillStyle = faint ? ink.soft : scene.inks[drawn.kind[i]];
          brush.fillText(clip(drawn.names[drawn.name[i]], Math.floor((Math.min(from + shown, wide) - begin - 6) / LETTER)), begin + 3, top + ROW / 2 - 0.5);
        }
      }
    };

    const drawMarked = (ink) => {
      const { row, start, end } = model.get("marked");
      if (row === undefined) return;
      brush.strokeStyle = ink.full;
      brush.lineWidth = 2;
      brush.strokeRect(x(start) - 1, tops[row] - lanes.scrollTop - 1, Math.max(x(end) - x(start), 2) + 1, ROW);
    };

    const drawNames = (ink, wide, high) => {
      brush.lineWidth = 1;
      for (const strip of scene.strips) {
        const top = strip.top - lanes.scrollTop;
        const bottom = top + strip.rows * ROW;
        if (bottom < HEAD || top > high) continue;
        brush.fillStyle = ink.soft;
        const at = between(top + ROW / 2, Math.min(HEAD + ROW / 2, bottom - ROW / 2), high);
        brush.fillText(clip(strip.name, Math.floor((GUTTER - 8) / LETTER)), 2, at);
        brush.strokeStyle = ink.rule;
        brush.beginPath();
        brush.moveTo(0, Math.max(bottom + GAP / 2 - 1, HEAD));
        brush.lineTo(wide, Math.max(bottom + GAP / 2 - 1, HEAD));
        brush.stroke();
      }
      brush.clearRect(0, 0, GUTTER - 1, HEAD);
    };

    const drawAxis = (ink, wide) => {
      const about = ((view.end - view.start) * 90) / width();
      const power = 10 ** Math.floor(Math.log10(about));
      const tick = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= about);
      const reach = Math.max(Math.abs(view.start), Math.abs(view.end));
      const [scale, unit] = reach < 1e3 ? [1, "ns"] : reach < 1e6 ? [1e3, "µs"] : reach < 1e9 ? [1e6, "ms"] : [1e9, "s"];
      const digits = between(Math.ceil(Math.log10(scale / tick)), 0, 9);
      brush.fillStyle = ink.soft;
      brush.strokeStyle = ink.rule;
      brush.lineWidth = 1;
      for (let time = Math.ceil(view.start / tick) * tick; time < view.end; time += tick) {
        const at = x(time);
        brush.beginPath();
        brush.moveTo(at, 17);
        brush.lineTo(at, 22);
        brush.stroke();
        const text = `${(time / scale).toFixed(digits)} ${unit}`;
        if (at + text.length * LETTER < wide + 12) brush.fillText(text, at + 2, 9);
      }
      const [low, high] = scene.span; // where in the whole file this is
      const place = (time) => GUTTER + between((time - low) / (high - low), 0, 1) * width();
      brush.fillStyle = ink.rule;
      brush.fillRect(GUTTER, HEAD - 3, width(), 2);
      brush.fillStyle = ink.soft;
      brush.fillRect(place(view.start), HEAD - 3, Math.max(place(view.end) - place(view.start), 3), 2);
    };

    // --- what is under the pointer

    const under = (event) => {
      const box = canvas.getBoundingClientRect();
      const [left, top] = [event.clientX - box.left, event.clientY - box.top];
      if (!drawn || left < GUTTER) return null;
      const [row, time] = [rowAt(top), timeAt(left) - drawn.origin];
      const near = (2 / width()) * (view.end - view.start);
      let best = null;
      for (let i = 0; row >= 0 && i < drawn.start.length; i += 1) {
        if (drawn.row[i] !== row) continue;
        const far = Math.max(drawn.start[i] - time, time - drawn.start[i] - drawn.length[i], 0);
        if (far <= near && (best === null || far < best.far)) best = { i, far, row };
      }
      return best;
    };

    const tell = (event) => {
      const found = under(event);
      hovered = found;
      canvas.style.cursor = found ? "pointer" : "grab";
      tip.hidden = !found;
      if (!found) return;
      const { i } = found;
      const name = drawn.names[drawn.name[i]];
      const many = drawn.count[i] > 1;
      tip.replaceChildren();
      make("strong", {}, tip).textContent = clip(name, 160);
      const more = many ? `the longest of ${drawn.count[i].toLocaleString("en")} events, together ${words(drawn.busy[i])}` : words(drawn.busy[i]);
      make("div", {}, tip).textContent = `${more} · ${scene.kinds[drawn.kind[i]]} · at ${words(Math.max(0, drawn.origin + drawn.start[i]))}`;
      const box = el.getBoundingClientRect();
      tip.style.left = `${between(event.clientX - box.left + 12, 0, box.width - tip.offsetWidth - 4)}px`;
      const below = event.clientY - box.top + 16;
      tip.style.top = `${below + tip.offsetHeight < el.clientHeight ? below : below - tip.offsetHeight - 28}px`;
    };

    // --- moving

    let grabbed = null;
    canvas.onpointerdown = (event) => {
      if (event.button) return;
      grabbed = { at: event.clientX, from: view, moved: false };
      canvas.setPointerCapture(event.pointerId);
    };
    canvas.onpointermove = (event) => {
      if (!grabbed) return tell(event);
      const by = event.clientX - grabbed.at;
      grabbed.moved ||= Math.abs(by) > 3;
      if (!grabbed.moved) return;
      tip.hidden = true;
      const time = (by / width()) * (grabbed.from.end - grabbed.from.start);
      move(grabbed.from.start - time, grabbed.from.end - time);
    };
    canvas.onpointerup = (event) => {
      const clicked = grabbed && !grabbed.moved && under(event);
      grabbed = null;
      if (!clicked) return;
      const { i, row } = clicked;
      const [low, high] = [drawn.origin + drawn.start[i], drawn.origin + drawn.start[i] + drawn.length[i]];
      const at = canvas.getBoundingClientRect().left;
      model.send({ ask: "pick", row, time: between(timeAt(event.clientX - at), low, high), within: (3 / width()) * (view.end - view.start) });
    };
    canvas.onpointercancel = () => (grabbed = null);
    canvas.onpointerleave = () => (tip.hidden = true);
    canvas.ondblclick = (event) => {
      const found = under(event);
      if (!found) return;
      const start = drawn.origin + drawn.start[found.i];
      const room = drawn.length[found.i] * 0.05 + 10;
      move(start - room, start + drawn.length[found.i] + room);
    };
    canvas.addEventListener(
      "wheel",
      (event) => {
        const inwards = event.ctrlKey || event.metaKey || event.altKey;
        if (inwards) zoom(2 ** between(event.deltaY / 120, -2, 2), timeAt(event.clientX - canvas.getBoundingClientRect().left));
        else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / width());
        else return; // the page, or the rows, scroll
        event.preventDefault();
      },
      { passive: false },
    );
    const home = () => fit(model.get("step").length ? model.get("step") : scene.span);
    const scroll = (by) => (lanes.scrollTop += by);
    const keys = {
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => scroll(-2 * ROW), ArrowDown: () => scroll(2 * ROW),
      a: () => pan(-0.2), d: () => pan(0.2), w: () => zoom(0.5), s: () => zoom(2),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), Home: home, 0: () => fit(scene.span),
      n: () => model.send({ ask: "next" }), p: () => model.send({ ask: "previous" }),
      "[": () => model.send({ ask: "step", by: -1 }), "]": () => model.send({ ask: "step", by: 1 }),
      Escape: () => model.send({ ask: "nothing" }),
    };
    canvas.onkeydown = (event) => {
      const action = keys[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation(); // the notebook has its own use for these keys
      action();
    };
    const moves = { "−": ["zoom out", () => zoom(2)], "+": ["zoom in", () => zoom(0.5)], "◀": ["earlier", () => pan(-0.5)],
      "▶": ["later", () => pan(0.5)], step: ["the chosen step", home], all: ["all of the file", () => fit(scene.span)] };
    for (const [sign, [title, action]] of Object.entries(moves)) {
      const button = make("button", { type: "button", title, "aria-label": title }, bar);
      button.textContent = sign;
      button.onclick = action;
    }
    hint.textContent =
      "drag or ← → to move, Ctrl + wheel or + − to zoom, double click to fill the view, click to see all calls of a name; n, p: next and previous match; [ ]: step";

    // --- changes from elsewhere

    const looked = () => {
      const window = model.get("window");
      if (JSON.stringify(window) === last) return;
      last = "";
      view = { start: window.start, end: window.end };
      redraw();
    };
    const marked = () => {
      const { row } = model.get("marked");
      if (row !== undefined) {
        const [top, room] = [tops[row] - lanes.scrollTop, lanes.clientHeight];
        if (top < HEAD || top > room - ROW) lanes.scrollTop = tops[row] - room / 2;
      }
      redraw();
    };
    const resized = () => {
      learn();
      redraw();
      ask();
    };
    lanes.onscroll = () => {
      redraw();
      ask();
    };
    learn();
    looked();
    take();
    const sizes = new ResizeObserver(resized);
    sizes.observe(lanes);
    const themes = new MutationObserver(redraw);
    themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "data-jp-theme-light", "class"] });
    const listening = [["change:window", looked], ["change:tiles", take], ["change:marked", marked], ["change:step", redraw], ["change:scene", resized]];
    for (const [name, action] of listening) model.on(name, action);
    return () => {
      sizes.disconnect();
      themes.disconnect();
      cancelAnimationFrame(frame);
      for (const [name, action] of listening) model.off(name, action);
    };
  },
};
