// Pictures of a message, on canvases: the content security policy loads no picture that the server did not serve.
import { el } from "./dom.js";

const SIDE = 2048; // pixels of the longer side that is sent; models see no more
const SHOWN = 320; // pixels of the longer side on the page

/** {name, url} of a picture's file, as a data: URL. Throws Error where the browser cannot read it. */
export async function readPicture(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} is no picture that this browser can read: try PNG or JPEG.`);
  }
  const isLossless = file.type === "image/png";
  const url = drawn(bitmap, SIDE).toDataURL(isLossless ? "image/png" : "image/jpeg", 0.9);
  bitmap.close();
  return { name: file.name, url };
}

function drawn(bitmap, side) {
  const scale = Math.min(1, side / Math.max(bitmap.width, bitmap.height));
  const canvas = el("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

export function showImages(images) {
  const row = el("div", { class: "pictures" });
  for (const { name, url } of images) {
    const place = el("figure", { role: "img", "aria-label": name });
    row.append(place);
    bitmapOf(url).then((bitmap) => { place.append(drawn(bitmap, SHOWN)); bitmap.close(); },
      () => { place.textContent = name; });
  }
  return row;
}

/** Of a data: URL, which the policy does not let fetch() read. */
async function bitmapOf(url) {
  const [head, body] = url.split(",", 2);
  const bytes = Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], { type: /^data:([^;]+)/.exec(head)[1] }));
}
