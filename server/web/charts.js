// Small pictures on canvases, in the colours of the style sheet.

/** The drawing context of a canvas as large as it is shown, cleared; lengths are CSS pixels. */
export function surface(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export function colours(...names) {
  const style = getComputedStyle(document.documentElement);
  return names.map((name) => style.getPropertyValue(`--${name}`).trim());
}

/** The last values as a line over a soft area; the newest is at the right edge. */
export function sparkline(canvas, values, length, colour) {
  const { context, width, height } = surface(canvas, 30);
  if (values.length < 2 || width === 0) return;
  const [stroke] = colours(colour), top = Math.max(...values, 1e-9);
  const step = width / (length - 1), first = width - step * (values.length - 1);
  const y = (value) => height - 1.5 - ((height - 4) * value) / top;
  context.beginPath();
  values.forEach((value, index) => context.lineTo(first + step * index, y(value)));
  context.strokeStyle = stroke;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(first, height);
  context.globalAlpha = 0.13;
  context.fillStyle = stroke;
  context.fill();
  context.globalAlpha = 1;
}

/** A column for each value, over a line at their mean. */
export function columns(canvas, values, colour) {
  const { context, width, height } = surface(canvas, 90);
  const top = Math.max(...values);
  if (!(top > 0) || width === 0) return;
  const [fill, line] = colours(colour, "track"), step = width / values.length;
  context.fillStyle = fill;
  values.forEach((value, index) => {
    const size = (height * value) / top;
    context.fillRect(index * step, height - size, Math.max(1, step - (step > 3 ? 1 : 0)), size);
  });
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  context.fillStyle = line;
  context.fillRect(0, height - (height * mean) / top - 0.5, width, 1);
}

/** The cells of the cache: each filled from below by its share in use, and by what is free but still cached. */
export function blockMap(canvas, { used, cached, perCell, numBlocks }) {
  const width = canvas.clientWidth;
  if (!used.length || width === 0) return;
  const columns = Math.max(1, Math.min(used.length, Math.floor(width / (used.length > 300 ? 11 : 14))));
  const size = width / columns, rows = Math.ceil(used.length / columns);
  const side = Math.min(size, 16), { context } = surface(canvas, Math.ceil(rows * side));
  const [usedColour, cachedColour, free] = colours("decode", "cached", "track");
  used.forEach((count, cell) => {
    const blocks = Math.min(perCell, numBlocks - cell * perCell);
    const x = (cell % columns) * size, y = Math.floor(cell / columns) * side, inner = side - 2;
    const inUse = (inner * count) / blocks, kept = (inner * cached[cell]) / blocks;
    context.fillStyle = free;
    context.fillRect(x, y, size - 2, inner);
    context.fillStyle = cachedColour;
    context.fillRect(x, y + inner - inUse - kept, size - 2, kept);
    context.fillStyle = usedColour;
    context.fillRect(x, y + inner - inUse, size - 2, inUse);
  });
}
